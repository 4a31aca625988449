"""Owns the processes of a cluster: starts them, waits until they answer, and leaves none behind."""

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import httpx
import psutil

from kvferry.cluster import guard, logs
from kvferry.errors import StartError

POLL_S = 0.2
PROBE_TIMEOUT_S = 2.0
KILL_S = 5.0  # for the guard to kill a tree, after its grace period
TAIL_LINES = 12

Progress = Callable[[str, float], None]
"""Told a process' name and the seconds waited for it so far."""


@dataclass
class Managed:
    """One process tree under a supervisor, and the file that its output goes to."""

    name: str
    log: Path
    process: subprocess.Popen[bytes]
    grace_s: float
    started: float = field(default_factory=time.monotonic)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def failure(self, what: str) -> StartError:
        """An error that says what happened, the likely cause, and where to read on."""
        cause = logs.likely_cause(self.log)
        lines = [f"{self.name} {what}" + (f": {cause}" if cause else "")]
        lines += [f"  | {line}" for line in logs.tail(self.log, TAIL_LINES)]
        return StartError("\n".join([*lines, f"  whole log: {self.log}"]))


class Supervisor:
    """Context manager that stops everything it started, whatever ends it.

    Each process runs under a guard (see `kvferry.cluster.guard`), so that nothing is left even if this process is
    killed. While it is entered from the main thread, SIGTERM and SIGHUP raise SystemExit there, so that ``with``
    blocks unwind as they do for Ctrl-C.
    """

    def __init__(self, log_directory: Path) -> None:
        self._log_directory = log_directory
        self._managed: dict[str, Managed] = {}
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # Where somebody else has a handler, or nohup had the signal ignored, it stays.
            numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
            self._handlers = {number: signal.signal(number, _exit) for number in numbers}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _undisturbed():
            self.stop(*self._managed)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], grace_s: float = guard.GRACE_S
    ) -> Managed:
        """Start a command in a session of its own, its output in ``<log directory>/<name>.log``.

        `grace_s` is how long it may take to end once it is asked to.
        """
        if name in self._managed:
            raise StartError(f"there is a process named {name} already")
        self._log_directory.mkdir(parents=True, exist_ok=True)
        log = self.log_of(name)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", guard.__name__, *command],
                env={**environment, guard.GRACE_VARIABLE: str(grace_s)},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._managed[name] = Managed(name, log, process, grace_s)
        return self._managed[name]

    def log_of(self, name: str) -> Path:
        """The file that a process of that name writes to."""
        return self._log_directory / f"{name}.log"

    def managed(self, name: str) -> Managed:
        """Raises:
        KeyError: there is no process of that name.
        """
        return self._managed[name]

    def wait_ready(self, health: Mapping[str, str], deadline_s: float, progress: Progress = lambda *_: None) -> None:
        """Wait until every named process answers 200 at its URL.

        Raises:
            StartError: one ended first, or did not answer within `deadline_s` seconds.
        """
        start, waiting = time.monotonic(), dict(health)
        with httpx.Client(timeout=PROBE_TIMEOUT_S, trust_env=False) as client:
            while waiting:
                self.require_running(waiting)
                elapsed = time.monotonic() - start
                for name in [name for name, url in waiting.items() if _answers(client, url)]:
                    del waiting[name]
                    progress(name, elapsed)
                for name in waiting:
                    progress(name, elapsed)
                    if elapsed > deadline_s:
                        raise self._managed[name].failure(f"did not become ready within {deadline_s:.0f} s")
                time.sleep(POLL_S if waiting else 0)

    def require_running(self, names: Iterable[str]) -> None:
        """Raises:
        StartError: one of the named processes has ended.
        """
        for managed in [self._managed[name] for name in names]:
            if not managed.running:
                raise managed.failure(f"ended with exit code {managed.process.returncode}")

    def stop(self, *names: str) -> None:
        """End the named processes and all their descendants, at most their grace period later."""
        stopping = [self._managed[name] for name in names]
        for managed in stopping:
            managed.process.terminate()
            if managed.process.stdin:
                managed.process.stdin.close()
        for managed in stopping:
            self._await_end(managed)
            del self._managed[managed.name]

    @staticmethod
    def _await_end(managed: Managed) -> None:
        try:
            managed.process.wait(managed.grace_s + KILL_S)
        except subprocess.TimeoutExpired:
            for process in _tree(managed.process.pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            managed.process.wait(KILL_S)

    def memory_bytes(self) -> int:
        """The memory of all processes under this supervisor; pages they share are counted once."""
        return sum(_shared_out(process) for tree in self.processes().values() for process in tree)

    def processes(self) -> dict[str, list[psutil.Process]]:
        """All processes that run under each name, guards included."""
        return {name: _tree(managed.process.pid) for name, managed in list(self._managed.items())}


def _exit(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Let no impatient second Ctrl-C interrupt the clean-up; that has deadlines of its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _shared_out(process: psutil.Process) -> int:
    """Proportional set size: a page shared by n processes counts 1/n in each. Read from smaps_rollup."""
    try:
        with open(f"/proc/{process.pid}/smaps_rollup") as file:
            return sum(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
    except (OSError, ValueError):
        return 0


class PeakMemory:
    """Samples a supervisor's memory every few seconds while it is entered; `bytes` is the largest sample."""

    def __init__(self, supervisor: Supervisor, interval_s: float = 10.0) -> None:
        self.bytes = 0
        self._supervisor = supervisor
        self._interval_s = interval_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak-memory", daemon=True)

    def _sample(self) -> None:
        while not self._end.wait(self._interval_s):
            self.bytes = max(self.bytes, self._supervisor.memory_bytes())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
