"""What this machine has: whether vLLM runs on its processors or on its GPUs, and which there are."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvferry.cluster.commands import cpu_build_installed
from kvferry.errors import SpecError

QUERY_S = 20.0


@dataclass(frozen=True)
class Machine:
    """`devices` are GPU ids, or numbers of processor cores where `cpu`."""

    cpu: bool
    devices: tuple[str, ...]

    @property
    def kind(self) -> str:
        return "cores" if self.cpu else "GPUs"


def this_machine(environment: Mapping[str, str] = os.environ) -> Machine:
    """The machine as the installed vLLM would use it; CUDA_VISIBLE_DEVICES and the process' cores bound it."""
    if cpu_build_installed():
        return Machine(True, tuple(map(str, sorted(os.sched_getaffinity(0)))))
    if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return Machine(False, tuple(filter(None, (device.strip() for device in visible.split(",")))))
    return Machine(False, _gpus())


def _gpus() -> tuple[str, ...]:
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(done.stdout.split())


def model_directory(model: str, environment: Mapping[str, str] = os.environ) -> Path:
    """The directory of a model that is given as one, or by the name it has in the local Hugging Face cache.

    Raises:
        SpecError: there is neither.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise SpecError(f"{model} is not a model directory: it has no config.json")
        return path.absolute()
    if model.count("/") > 1 or model.startswith((".", "/", "~")):
        raise SpecError(f"there is no model directory {model}")
    repository = _hub(environment) / f"models--{model.replace('/', '--')}"
    try:
        snapshot = repository / "snapshots" / (repository / "refs" / "main").read_text().strip()
    except OSError:
        snapshot = repository
    if not (snapshot / "config.json").is_file():
        raise SpecError(
            f"there is no model directory {model}, and no model of that name in {repository.parent}; "
            f"fetch it first, for example with `hf download {model}`"
        )
    return snapshot


def _hub(environment: Mapping[str, str]) -> Path:
    if cache := environment.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    return Path(environment.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "hub"
