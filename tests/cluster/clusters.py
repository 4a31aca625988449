"""Clusters of stand-in engines: everything but vLLM is real, the gateway too."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

import kvferry
from kvferry.cluster import control
from kvferry.cluster.control import ClusterStatus, InstanceStatus, Request
from kvferry.cluster.machine import Machine
from kvferry.cluster.manifest import parse
from kvferry.cluster.preparation import prepare
from kvferry.cluster.session import Session
from kvferry.cluster.state import StateDirectory
from kvferry.errors import KVFerryError

DEADLINE_S = 40.0
STANDIN = Path(__file__).parent / "standin"
SOURCE = Path(kvferry.__file__).parent.parent
CONFIG = (
    '{"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 384}'
)
NO_CORES_TO_SPARE = Machine(True, ("0",))


def model(directory: Path) -> Path:
    """A directory that passes for a model as long as nobody loads it."""
    path = directory / "model"
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(CONFIG)
    return path


def manifest(directory: Path, **more: Any) -> dict[str, Any]:
    """As a file would say it."""
    environment = {"PYTHONPATH": f"{STANDIN}:{SOURCE}", **more.pop("environment", {})}
    return {"model": str(model(directory)), "served_model_name": "m", "environment": environment, **more}


def until(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """What the condition returns, once that is true."""
    end = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < end, f"{what}: not within {deadline_s:.0f} s"
        time.sleep(0.02)
    return found


def gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Watched:
    """A view that remembers what it was shown."""

    def __init__(self) -> None:
        self.seen: list[ClusterStatus] = []

    def show(self, status: ClusterStatus) -> None:
        self.seen.append(status)

    def states_of(self, name: str) -> list[str]:
        states = [one.state for status in self.seen for one in status.instances if one.name == name]
        return [state for at, state in enumerate(states) if at == 0 or states[at - 1] != state]


class Cluster:
    """A session in a thread of its own, and what the other commands see of it."""

    def __init__(self, directory: Path, given: dict[str, Any]) -> None:
        self.state = StateDirectory("default", directory / "state")
        self.state.acquire()
        prepared = prepare(parse(given), self.state, NO_CORES_TO_SPARE, self.state.secret)
        self.state.write_keys()
        self.view = Watched()
        self.session = Session(prepared.allocator, prepared.members, prepared.front, self.state, self.view)
        self.url = prepared.front.url
        self.error: KVFerryError | None = None
        self.served: bool | None = None
        self._serving = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.served = self.session.run(self._serves)
        except KVFerryError as error:
            self.error = error

    def _serves(self, url: str) -> None:
        self.url = url
        self._serving.set()

    def start(self) -> None:
        self._thread.start()

    def await_serving(self) -> None:
        until(lambda: self._serving.is_set() or not self._thread.is_alive(), "serving")
        if self.error:
            raise self.error

    def join(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        if self._thread.is_alive():
            self.session.request_stop()
        self.join()
        self.state.release()

    def instance(self, name: str) -> InstanceStatus | None:
        return next((one for one in self.session.status().instances if one.name == name), None)

    def process(self, name: str) -> psutil.Process:
        """The one under an instance's guard."""
        port = self.url.rpartition(":")[2] if name == "gateway" else self._port(name)
        found = [p for p in self.processes() if "kvferry.cluster.guard" not in p.cmdline() and port in p.cmdline()]
        assert found, f"{name} does not run"
        return found[0]

    def _port(self, name: str) -> str:
        one = self.instance(name)
        assert one is not None
        return one.url.rpartition(":")[2]

    def processes(self) -> list[psutil.Process]:
        """All that belong to it, guards too."""
        mine = psutil.Process(os.getpid()).children(recursive=True)
        return [
            p for p in mine if not gone(p) and (str(self.state.path) in _text(p) or "--served-model-name" in _text(p))
        ]

    def scale(self, **wanted: int) -> str:
        with control.asked(self.state, Request("scale", **wanted), DEADLINE_S) as (result, _):
            return str(result)

    def ask(self, max_tokens: int = 4, **more: Any) -> httpx.Response:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": max_tokens, **more}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=DEADLINE_S, trust_env=False)


def _text(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


@contextmanager
def started(directory: Path, **more: Any) -> Iterator[Cluster]:
    """A cluster that serves."""
    cluster = Cluster(directory, manifest(directory, **more))
    cluster.start()
    try:
        cluster.await_serving()
        yield cluster
    finally:
        cluster.stop()
