"""The state directory of a cluster: what tells clusters of one machine apart, and lets other commands find one.

A cluster runs as long as somebody holds the lock on its ``lock`` file, which the system releases with the process,
however that ends. What else is in the directory of a cluster that does not run is left over and means nothing.
"""

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from kvferry.errors import ClusterError

SECRET_BYTES = 32
TRIES, PAUSE_S = 5, 0.05
LOCK, RECORD, SOCKET = "lock", "record.json", "control.sock"


def state_root(environment: Mapping[str, str] = os.environ) -> Path:
    """`KVFERRY_STATE`, else `$XDG_STATE_HOME/kvferry`, else `~/.local/state/kvferry`."""
    if chosen := environment.get("KVFERRY_STATE"):
        return Path(chosen).absolute()
    base = environment.get("XDG_STATE_HOME")
    return (Path(base).absolute() if base else Path.home() / ".local" / "state") / "kvferry"


class Record(msgspec.Struct, frozen=True):
    """What a cluster holds that another one on this machine must not take."""

    pid: int
    ports: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()


class StateDirectory:
    """The files of one cluster."""

    def __init__(self, name: str, root: Path | None = None) -> None:
        self.name = name
        self.root = root or state_root()
        self.path = self.root / name
        self._lock: int | None = None

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def own_log(self) -> Path:
        """What a detached cluster itself says."""
        return self.path / "up.log"

    @property
    def secret(self) -> Path:
        return self.path / "secret"

    @property
    def admin_key(self) -> Path:
        return self.path / "admin-key"

    @property
    def socket(self) -> Path:
        return self.path / SOCKET

    @property
    def running(self) -> bool:
        """Whether a process holds the lock."""
        if not (self.path / LOCK).exists():
            return False
        held = self._try_lock()
        if held is not None:
            os.close(held)
        return held is None

    def acquire(self) -> None:
        """Become the one that runs under this name; what a dead one left is removed, its logs kept until then too.

        Raises:
            ClusterError: one runs already, or the directory cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.path.chmod(0o700)
            self._lock = self._lock_soon()
        except OSError as error:
            raise ClusterError(f"the state directory {self.path} cannot be used: {error.strerror}") from error
        if self._lock is None:
            raise ClusterError(
                f"a cluster named {self.name} is running; `kvferry down{self._option}` ends it, "
                "`--name` starts another one beside it"
            )
        self._clear()

    def release(self) -> None:
        """Let go of the name; logs stay to be read."""
        if self._lock is not None:
            for path in (self.socket, self.path / RECORD, self.secret, self.admin_key):
                path.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def hand_over(self) -> None:
        """A child has inherited the lock; leave it to that."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def require_running(self) -> None:
        """Raises:
        ClusterError: no cluster of this name runs; the text names those that do.
        """
        if not self.running:
            others = ", ".join(state.name for state in running_clusters(self.root))
            hint = f"running: {others}" if others else "none is running"
            raise ClusterError(f"no cluster named {self.name} is running ({hint})")

    @property
    def _option(self) -> str:
        return "" if self.name == "default" else f" --name {self.name}"

    def _lock_soon(self) -> int | None:
        """Whoever only asks whether it is held holds it for a moment."""
        for _ in range(TRIES):
            if (lock := self._try_lock()) is not None:
                return lock
            time.sleep(PAUSE_S)
        return None

    def _try_lock(self) -> int | None:
        lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return lock

    def _clear(self) -> None:
        for path in self.path.iterdir():
            if path.name == LOCK:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def write_keys(self) -> None:
        """A fresh secret and a fresh admin key, for this user only."""
        for path in (self.secret, self.admin_key):
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(file, "w") as output:
                output.write(secrets.token_hex(SECRET_BYTES) + "\n")

    def write_record(self, record: Record) -> None:
        """Atomically."""
        part = self.path / f"{RECORD}.part"
        part.write_bytes(msgspec.json.encode(record))
        part.rename(self.path / RECORD)

    def record(self) -> Record:
        """What was written; nothing where nothing was, or what was is broken."""
        try:
            return msgspec.json.decode((self.path / RECORD).read_bytes(), type=Record)
        except (OSError, msgspec.DecodeError):
            return Record(0)


def running_clusters(root: Path | None = None) -> list[StateDirectory]:
    """All that run on this machine as this user."""
    directory = root or state_root()
    if not directory.is_dir():
        return []
    states = [StateDirectory(path.name, directory) for path in sorted(directory.iterdir()) if path.is_dir()]
    return [state for state in states if state.running]


@contextmanager
def one_at_a_time(root: Path | None = None) -> Iterator[None]:
    """While it is entered nobody else chooses ports and devices: one who does sees the records of all before."""
    directory = root or state_root()
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(directory / "allocation.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ClusterError(f"the state directory {directory} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
