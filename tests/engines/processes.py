"""The processes of an instance, by their titles, and signals to them."""

import contextlib
from collections.abc import Sequence

import psutil

from .conftest import Instance

WORKER, ENGINE_CORE, API_SERVER = "VLLM::Worker", "VLLM::EngineCore", "api_server"


def family(instance: Instance, name: str = "") -> list[psutil.Process]:
    """All processes of an instance whose titles contain `name`."""
    guard = psutil.Process(instance.managed.process.pid)
    return [process for process in guard.children(recursive=True) if name in _title(process)]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def send(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
