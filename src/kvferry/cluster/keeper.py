"""Keeps one process of a cluster alive: starts it, waits until it answers, watches it, starts it again when it ends."""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import httpx
import psutil

from kvferry.cluster import pulse
from kvferry.cluster.pulse import Load
from kvferry.cluster.supervisor import Managed, Supervisor
from kvferry.errors import KVFerryError, StartError

POLL_S = 0.2
LOOK_EVERY_S = 1.0
UNWELL_S = 10.0
STABLE_S = 60.0
BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
JOIN_S = 30.0


class State(StrEnum):
    """What a process is doing, as its keeper sees it."""

    STARTING = "starting"
    PROBING = "probing"
    READY = "ready"
    DRAINING = "draining"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True)
class Job:
    """What a keeper keeps.

    Attributes:
        command: made anew for each start.
        ready_url: answers 200 once it can be used.
        url: of an instance that is looked at while it runs; None for what is only to run.
        settle: called when it answers, before it is called ready; an error at the first start fails it.
    """

    name: str
    command: Callable[[], Sequence[str]]
    environment: Mapping[str, str]
    ready_url: str
    start_timeout_s: float
    grace_s: float
    url: str | None = None
    settle: Callable[[], None] = lambda: None


class Keeper:
    """A thread with one process. What fails before it was ever ready stays down; later it is started again."""

    def __init__(self, job: Job, supervisor: Supervisor, changed: Callable[[], None] = lambda: None) -> None:
        self.job = job
        self.failure: KVFerryError | None = None
        self.load: Load | None = None
        self.detail = ""
        self.restarts = 0
        self.log = supervisor.log_of(job.name)
        self._supervisor = supervisor
        self._changed = changed
        self._process: Managed | None = None
        self._owning = threading.Lock()
        self._end = threading.Event()
        self._settled = threading.Event()
        self.was_ready = False
        self._ready_at: float | None = None
        self._kept = True
        self._state, self._since = State.STARTING, time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"keeper-{job.name}", daemon=True)

    @property
    def state(self) -> State:
        return self._state

    @property
    def since_s(self) -> float:
        return time.monotonic() - self._since

    @property
    def answering(self) -> bool:
        return self._state in (State.PROBING, State.READY)

    @property
    def settled(self) -> bool:
        """Whether its first start has ended, in whatever way."""
        return self._settled.is_set()

    def start(self) -> None:
        self._thread.start()

    def drain(self) -> None:
        """It will be stopped soon; if it ends by itself meanwhile, it stays down."""
        self._kept = False
        if not self.answering:
            self._end.set()
        self._set(State.DRAINING)

    def stop(self) -> None:
        """End the process and the thread."""
        self._end.set()
        if self._process is not None:
            self._set(State.STOPPING)
        self._discard()
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)

    def kill(self) -> None:
        """Let a process that is being stopped use no more of its grace period."""
        process = self._process
        with contextlib.suppress(psutil.NoSuchProcess):
            # Its guard ends what is left of the tree when its own child has ended.
            for child in psutil.Process(process.process.pid).children() if process else ():
                child.kill()

    def _set(self, state: State, detail: str = "") -> None:
        if (state, detail) != (self._state, self.detail):
            self._since = time.monotonic() if state is not self._state else self._since
            self._state, self.detail = state, detail
            self._changed()

    def _run(self) -> None:
        failures = 0
        try:
            while not self._end.is_set():
                self._ready_at = None
                ended = self._once()
                if self._end.is_set() or not self._kept:
                    return
                if not self.was_ready:
                    self.failure = ended
                    return
                failures = 1 if self._was_stable else failures + 1
                self._discard()
                self._pause(BACKOFF_S[min(failures, len(BACKOFF_S)) - 1], str(ended).splitlines()[0])
                self.restarts += 1
        except Exception as error:  # a keeper that dies without a word would leave a process to nobody
            self.failure = StartError(f"{self.job.name} cannot be kept: {error!r}")
        finally:
            self._discard()
            self._set(State.FAILED if self.failure else State.STOPPED, str(self.failure or "").partition("\n")[0])
            self._settled.set()

    @property
    def _was_stable(self) -> bool:
        return self._ready_at is not None and time.monotonic() - self._ready_at > STABLE_S

    def _once(self) -> KVFerryError:
        """Start it and watch it to its end; says how it ended."""
        try:
            self._launch()
            self._await_answer()
            self._set(State.PROBING, self.detail)
            self._settle()
            self.was_ready, self._ready_at = True, time.monotonic()
            if self._kept:
                self._set(State.READY, self.detail)
            self._settled.set()
            return self._watch()
        except KVFerryError as error:
            return error

    def _launch(self) -> None:
        self._set(State.STARTING, self.detail)
        with self._owning:
            if self._end.is_set():
                raise StartError(f"{self.job.name} is not wanted any more")
            if self.log.exists():
                self.log.replace(self.previous_log)
            job = self.job
            self._process = self._supervisor.start(job.name, job.command(), job.environment, job.grace_s)

    @property
    def previous_log(self) -> Path:
        """Of the process before this one."""
        return self.log.with_suffix(".previous.log")

    def _await_answer(self) -> None:
        start = time.monotonic()
        with httpx.Client(timeout=pulse.TIMEOUT_S, trust_env=False) as client:
            while not _answers(client, self.job.ready_url):
                self._require_running()
                if time.monotonic() - start > self.job.start_timeout_s:
                    raise self._failure(f"did not become ready within {self.job.start_timeout_s:.0f} s")
                if self._end.wait(POLL_S):
                    raise StartError(f"{self.job.name} is not wanted any more")
        self._require_running()  # else it was somebody else who answered on its port

    def _settle(self) -> None:
        try:
            self.job.settle()
        except KVFerryError as error:
            self._end.wait(POLL_S)  # a process that is just ending says more than a connection that it broke
            self._require_running()
            if not self.was_ready:
                raise
            # Peers may be down at the same time; the gateway finds out which pairs work.
            self.detail = str(error).partition("\n")[0]

    def _watch(self) -> KVFerryError:
        """Returns when it has ended, says for long that it is unwell, or is to be stopped."""
        next_look = time.monotonic()
        unwell_since: float | None = None
        with httpx.Client(timeout=pulse.TIMEOUT_S, trust_env=False) as client:
            while not self._end.wait(POLL_S):
                try:
                    self._require_running()
                except StartError as error:
                    return error
                if self.job.url is None or time.monotonic() < next_look:
                    continue
                seen = pulse.look(client, self.job.url)
                self.load = seen.load or self.load
                unwell_since = None if seen.well is not False else unwell_since or time.monotonic()
                if unwell_since is not None and time.monotonic() - unwell_since > UNWELL_S:
                    return self._failure(f"said for {UNWELL_S:.0f} s that it is unwell")
                next_look = time.monotonic() + LOOK_EVERY_S
        return StartError(f"{self.job.name} was stopped")

    def _require_running(self) -> None:
        if self._process is not None and not self._process.running:
            raise self._failure(f"ended with exit code {self._process.process.returncode}")

    def _failure(self, what: str) -> StartError:
        return self._process.failure(what) if self._process else StartError(f"{self.job.name} {what}")

    def _pause(self, seconds: float, why: str) -> None:
        self.load = None
        self._set(State.RESTARTING, why)
        self._end.wait(seconds)

    def _discard(self) -> None:
        with self._owning:
            if self._process is not None:
                self._supervisor.stop(self.job.name)
                self._process = None


def _answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def stop_all(keepers: Sequence[Keeper], hurry: threading.Event) -> None:
    """Stop them side by side; `hurry` ends their grace periods."""
    threads = [threading.Thread(target=keeper.stop, name=f"stop-{keeper.job.name}") for keeper in keepers]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if hurry.is_set():
            for keeper in keepers:
                keeper.kill()
        for thread in threads:
            thread.join(POLL_S / len(threads))
