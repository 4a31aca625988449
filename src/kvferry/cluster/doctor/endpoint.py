"""Run as a process: one NIXL agent with memory to read and to read into, told what to do over standard input.

A process of its own, because native code loads what a peer sent, and because UCX says what it really used when it ends.
"""

import mmap
import secrets
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np

from kvferry.cluster.child import Child, running, serve
from kvferry.errors import TransferError
from kvferry.geometry import Descriptors, Span
from kvferry.transport.nixl import Agent

SMALLEST, LARGEST = 1 << 16, 1 << 30
READ_S = 30.0
REPEATS, ENOUGH_S = 5, 2.0
PIECE, STRIDE = 256, 1024
MOST_PIECES = 8192
PLACE = ("DRAM", 0, "DRAM", 0)


def endpoint(size: int, log: Mapping[str, str] | None = None) -> AbstractAsyncContextManager[Child]:
    """The handle on one of these processes; `log`, of ``ucx_log``, is whole once it has ended."""
    return running(__name__, str(size), variables=log, let_end=log is not None)


class Endpoint:
    """The first half of the memory is there to be read, the second half to read into."""

    def __init__(self, size: int) -> None:
        if not SMALLEST <= size <= LARGEST:
            raise TransferError(f"a size of {size} bytes is not between {SMALLEST} and {LARGEST}")
        self._size = size
        self._memory = np.frombuffer(mmap.mmap(-1, 2 * size), np.uint8)
        self._fill = 1 + secrets.randbelow(255)
        self._source[:], self._target[:] = self._fill, 0
        # Names must be unguessable: an agent that a stranger has spoilt cannot be met again under its name.
        self._agent = Agent(f"kvferry-doctor-{secrets.token_hex(8)}")
        start = int(self._memory.ctypes.data)
        self._agent.register([("DRAM", 0, Span(start, start + 2 * size))])

    @property
    def _source(self) -> np.ndarray:
        return self._memory[: self._size]

    @property
    def _target(self) -> np.ndarray:
        return self._memory[self._size :]

    def description(self) -> dict[str, Any]:
        """What another endpoint needs to ``measure`` this one."""
        metadata = b64encode(self._agent.metadata()).decode()
        return {"metadata": metadata, "address": int(self._source.ctypes.data), "size": self._size, "fill": self._fill}

    def measure(self, peer: dict[str, Any]) -> dict[str, float]:
        """Read from another endpoint: its whole memory at once, then small pieces apart from each other."""
        size, address = min(int(peer["size"]), self._size), int(peer["address"])
        agent = self._agent.connect(b64decode(peer["metadata"], validate=True))
        whole = np.array([0]), np.array([size])
        self._read(agent, address, *whole)
        if not (self._target[:size] == int(peer["fill"])).all():
            raise TransferError("the bytes that were read are not those that the other side holds")
        pieces = min(MOST_PIECES, size // STRIDE)
        small = np.arange(pieces) * STRIDE, np.full(pieces, PIECE)
        self._read(agent, address, *small)
        seconds = best(lambda: self._read(agent, address, *whole))
        apart = best(lambda: self._read(agent, address, *small))
        return {"gigabytes_per_s": size / seconds / 1e9, "us_per_descriptor": apart / pieces * 1e6}

    def copy(self) -> dict[str, float]:
        """How fast this process copies as much memory by itself."""
        seconds = best(lambda: np.copyto(self._target, self._source))
        return {"gigabytes_per_s": self._size / seconds / 1e9}

    def _read(self, agent: str, address: int, offsets: np.ndarray, sizes: np.ndarray) -> None:
        local = int(self._target.ctypes.data) + offsets.astype(np.int64)
        ranges = Descriptors(local, address + offsets.astype(np.int64), sizes.astype(np.int64))
        read = self._agent.read(agent, {PLACE: ranges})
        if not self._agent.wait(read, READ_S):
            raise TransferError(f"a read of {ranges.bytes} bytes has not ended within {READ_S:.0f} s")
        if read.error:
            raise TransferError(read.error)


def best(action: Callable[[], Any]) -> float:
    """Seconds of the quickest of some runs: what disturbs one only ever makes it slower."""
    taken: list[float] = []
    while len(taken) < REPEATS and sum(taken) < ENOUGH_S:
        begin = time.perf_counter()
        action()
        taken.append(time.perf_counter() - begin)
    return max(min(taken), 1e-9)


def answer(endpoint: Endpoint, request: dict[str, Any]) -> dict[str, Any]:
    match request.get("do"):
        case "describe":
            return endpoint.description()
        case "measure":
            return endpoint.measure(request["peer"])
        case "copy":
            return endpoint.copy()
    raise TransferError(f"nothing is known of {request.get('do')!r}")


def main() -> None:
    """The size is the only argument."""

    def make() -> Callable[[dict[str, Any]], Any]:
        endpoint = Endpoint(int(sys.argv[1]))
        return lambda request: answer(endpoint, request)

    serve(make)


if __name__ == "__main__":
    main()
