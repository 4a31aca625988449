"""The control socket of a running cluster: one line of JSON with a request, one line of JSON with its answer.

It lies in the cluster's state directory, which nobody but its user may enter.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import msgspec

from kvferry.cluster.state import StateDirectory
from kvferry.errors import ClusterError, KVFerryError

MOST_BYTES = 1 << 20
QUICK_S = 10.0


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`do` is ``status``, ``scale`` or ``down``; the other two are replicas wanted, None for as many as there are."""

    do: str
    prefill: int | None = None
    decode: int | None = None


class Reply(msgspec.Struct, frozen=True):
    """`error` says why it was not done; `result` is JSON."""

    error: str | None = None
    bad_input: bool = False
    result: Any = None


class InstanceStatus(msgspec.Struct, frozen=True):
    """One process of the cluster as it is now.

    Attributes:
        state: a ``kvferry.cluster.keeper.State``.
        since_s: seconds in that state.
        detail: why it was restarted last, or what is awaited.
        running, waiting: requests, as it says itself; None where it says nothing.
        kv_usage: used fraction of its KV cache, the fullest data parallel rank's.
    """

    name: str
    role: str
    layout: str
    devices: tuple[str, ...]
    url: str
    log: str
    state: str
    since_s: float
    detail: str = ""
    restarts: int = 0
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None


class ClusterStatus(msgspec.Struct, frozen=True):
    """The whole cluster as it is now; `state` is ``starting``, ``serving`` or ``draining``."""

    name: str
    state: str
    url: str
    model: str
    pid: int
    logs: str
    instances: tuple[InstanceStatus, ...]


class ControlServer:
    """Answers requests in threads while it is entered; `answer` may raise the project's exceptions."""

    def __init__(self, state: StateDirectory, answer: Callable[[Request], Any]) -> None:
        self._answer = answer
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._state = state

    def __enter__(self) -> Self:
        with _short_path(self._state.path) as directory:
            self._socket.bind(f"{directory}/{self._state.socket.name}")
        self._socket.listen(16)
        threading.Thread(target=self._accept, name="control", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        # A thread in accept() notices a shutdown, and not that somebody else closed its socket.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="control-request", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(QUICK_S)
            reply = self._reply(_line(connection))
            connection.sendall(msgspec.json.encode(reply) + b"\n")
            # Until this process ends, so that whoever asked for that sees it.
            connection.settimeout(None)
            connection.recv(1)

    def _reply(self, line: bytes) -> Reply:
        try:
            return Reply(result=msgspec.to_builtins(self._answer(msgspec.json.decode(line, type=Request))))
        except msgspec.DecodeError as error:
            return Reply(error=f"not a request: {error}", bad_input=True)
        except KVFerryError as error:
            return Reply(error=str(error), bad_input=isinstance(error, ClusterError))


@contextlib.contextmanager
def asked(state: StateDirectory, request: Request, deadline_s: float | None = QUICK_S) -> Iterator[tuple[Any, "End"]]:
    """Ask a running cluster; yields its result, and something to await its end with.

    Raises:
        ClusterError: none runs, it does not answer, or refuses.
        KVFerryError: it could not do what it was asked to.
    """
    state.require_running()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.settimeout(QUICK_S)
            with _short_path(state.path) as directory:
                connection.connect(f"{directory}/{state.socket.name}")
            connection.settimeout(deadline_s)
            connection.sendall(msgspec.json.encode(request) + b"\n")
            reply = msgspec.json.decode(_line(connection), type=Reply)
        except (OSError, msgspec.DecodeError) as error:
            raise ClusterError(f"the cluster named {state.name} does not answer: {error}") from error
        if reply.error:
            raise (ClusterError if reply.bad_input else KVFerryError)(reply.error)
        yield reply.result, End(connection)


class End:
    """The end of the process at the other side of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def wait(self, deadline_s: float) -> bool:
        """Whether it came within so many seconds."""
        self._connection.settimeout(deadline_s)
        try:
            return self._connection.recv(1) == b""
        except TimeoutError:
            return False
        except OSError:
            return True


def status(state: StateDirectory) -> ClusterStatus:
    """Raises:
    ClusterError: no such cluster runs, or it does not answer.
    """
    with asked(state, Request("status")) as (result, _):
        return msgspec.convert(result, ClusterStatus)


def _line(connection: socket.socket) -> bytes:
    """Up to the newline; what is too long, or ends without one, is no JSON and is refused as such."""
    received = b""
    while not received.endswith(b"\n") and len(received) <= MOST_BYTES:
        piece = connection.recv(1 << 16)
        if not piece:
            break
        received += piece
    return received


@contextlib.contextmanager
def _short_path(directory: Path) -> Iterator[str]:
    """A name for the directory that fits into a socket's address, which holds 107 bytes."""
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
