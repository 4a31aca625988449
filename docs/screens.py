"""What the commands show, with made-up clusters and findings, as pictures for the site.

`python docs/screens.py DIRECTORY` writes them at several widths, with and without colour, to be looked at.
"""

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console, RenderableType
from rich.terminal_theme import MONOKAI

from kvferry.cli import doctor, plan, table
from kvferry.cluster.control import ClusterStatus, InstanceStatus
from kvferry.cluster.doctor.findings import Finding, ok, problem, warning
from kvferry.cluster.layer_reads import Link, Question
from kvferry.cluster.pairing import report
from kvferry.cluster.spec import Layout

MODELS = Path(__file__).parent / "models"
SITE_WIDTH = 110
WIDTHS = (120, 80, 50)


def _instance(name: str, layout: str, devices: str, state: str, **more: object) -> InstanceStatus:
    role = name.partition("-")[0]
    log = f"/home/me/.local/state/kvferry/default/logs/{name}.log"
    return InstanceStatus(name, role, layout, tuple(devices), "http://127.0.0.1:1", log, state, 41.0, **more)  # type: ignore[arg-type]


def _cluster(state: str, *instances: InstanceStatus) -> ClusterStatus:
    where = "/home/me/.local/state/kvferry/default/logs"
    return ClusterStatus("default", state, "http://127.0.0.1:8080", "llama", 1, where, instances)


STARTING = _cluster(
    "starting",
    _instance("prefill-0", "tp=2,pp=1,dp=1", "01", "probing"),
    _instance("prefill-1", "tp=2,pp=1,dp=1", "23", "starting"),
    _instance("decode-0", "tp=2,pp=1,dp=2", "4567", "starting"),
)
SERVING = _cluster(
    "serving",
    _instance("prefill-0", "tp=2,pp=1,dp=1", "01", "ready", running=3, waiting=12, kv_usage=0.41),
    _instance(
        "prefill-1",
        "tp=2,pp=1,dp=1",
        "23",
        "restarting",
        restarts=1,
        detail="prefill-1 ended with exit code 1: CUDA error: an illegal memory access was encountered",
    ),
    _instance("decode-0", "tp=2,pp=1,dp=2", "4567", "ready", running=57, waiting=0, kv_usage=0.68),
    _instance("gateway", "", "", "ready"),
)
FINDINGS: list[Finding] = [
    ok("vllm", "0.32.0"),
    ok("torch", "2.13.0"),
    ok("nixl", "nixl 1.5.1, nixl-cu12 1.5.1"),
    ok("plugin", "visible to vLLM as kvferry.vllm.plugin:register"),
    problem("VLLM_PLUGINS", "'lora' keeps the plugin kvferry out", "add kvferry to VLLM_PLUGINS, or unset it"),
    ok("ucx transports", "UCX 1.23.0: rc_mlx5, dc_mlx5, tcp, sysv, posix, cma, cuda_copy, cuda_ipc, self"),
    ok("ucx transfer", "two processes here read over cma/memory (zero-copy)"),
    ok("GPU/NIC affinity", "GPU0-GPU3: mlx5_0 (PIX), GPU4-GPU7: mlx5_1 (PIX)"),
    problem("locked memory", "8.39 MB, and RDMA locks the whole KV cache", "ulimit -l unlimited, or LimitMEMLOCK"),
    ok("shared memory", "23.6 GB of 25.3 GB free in /dev/shm"),
    warning(
        "advertised host",
        "127.0.0.1, from VLLM_HOST_IP: other hosts cannot reach it",
        "nothing, if all instances run here; else export VLLM_HOST_IP=<an address that the others reach>",
    ),
]


def _plan(_: int) -> RenderableType:
    config = json.loads((MODELS / "llama-3.1-70b" / "config.json").read_text())
    question = Question(6000, 16, "bfloat16", Link(100.0, "assumed"))
    made = report(config, Layout.parse("tp=2,pp=2"), Layout.parse("tp=4"), question).plan
    assert made
    return plan.screen(made, "llama-3.1-70b")


SCREENS: dict[str, Callable[[int], RenderableType]] = {
    "up-starting": lambda width: table.table(STARTING, width),
    "up-serving": lambda width: table.table(SERVING, width),
    "doctor": lambda width: doctor.screen(FINDINGS, width),
    "plan": _plan,
}


def svg(name: str, width: int, colour: bool = True) -> str:
    """One screen as a picture that needs nothing from elsewhere."""
    console = Console(
        record=True,
        width=width,
        file=io.StringIO(),
        highlight=False,
        force_terminal=colour,
        color_system="truecolor" if colour else None,
    )
    console.print(SCREENS[name](width))
    drawn = console.export_svg(title=f"kvferry {name.partition('-')[0]}", theme=MONOKAI, unique_id=f"kvferry-{name}")
    # Rich asks a server for a font; any fixed one does.
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL).replace("Fira Code", "DejaVu Sans Mono")


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name in SCREENS:
        for width in WIDTHS:
            for colour in (True, False):
                file = directory / f"{name}-{width}{'' if colour else '-plain'}.svg"
                file.write_text(svg(name, width, colour))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
