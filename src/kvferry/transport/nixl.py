"""NIXL agents that read from others and are read from. The only module that imports nixl.

An agent belongs to one thread. A producer's agent is passive: it registers its memory and is read.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvferry.errors import TransferError
from kvferry.geometry import Descriptors, Span

logger = logging.getLogger(__name__)

PROGRESS_DELAY_US = 5000
"""How long NIXL's progress thread sleeps between two looks at its connections, in microseconds.

NIXL's Python wrapper leaves no choice but 0, a thread that spins a whole core per agent for ever. The thread
wakes on traffic all the same, so the pause costs no latency: with 1000, 2000, 5000 and 10000 an idle agent cost 2.6,
1.7, 0.8 and 0.5% of a core, and reads of 4 KiB and 64 MiB over shared memory and over TCP took equally long.
"""

POLL_S = 0.0002
"""Between two looks at reads under way. Over TCP they stand still meanwhile once a socket's buffer is full: with 0.5 ms
a read of 295 MB ran at 0.85 of the ceiling, with 0.2 and 0.1 ms at 0.94 and 0.95, for the same processor time."""

SCRATCH_BYTES = 8

# UCX's registration cache grows without bound under vLLM's allocator unless told otherwise
# (vLLM issue 24264, pull 32181); UCX reads these when it is loaded.
_UCX_DEFAULTS = {"UCX_RCACHE_MAX_UNRELEASED": "1024"}


@dataclass(slots=True)
class Read:
    """READs of one request from one remote agent.

    Attributes:
        handles: NIXL handles that have not ended yet.
        error: the first thing that went wrong, or None.
        bytes, descriptors: what was posted.
    """

    agent: str
    handles: list[int] = field(default_factory=list)
    error: str | None = None
    bytes: int = 0
    descriptors: int = 0


class Agent:
    """What reads from others, and what others read from: a NIXL agent each, with the same memory.

    Who is read from must answer at any time: NIXL's progress thread does that. Who reads asks anyway how far it is, and
    a progress thread would only fight with it for UCX's lock (`docs/performance.md` says what that costs).

    Args:
        name: unique among all agents it will meet.
        progress_delay_us: see ``PROGRESS_DELAY_US``.
        backend: NIXL plugin that moves the bytes.
        backend_options: passed to the plugin as they are.

    Raises:
        TransferError: NIXL is not installed, or the plugin does not start.
    """

    def __init__(
        self,
        name: str,
        *,
        progress_delay_us: int = PROGRESS_DELAY_US,
        backend: str = "UCX",
        backend_options: dict[str, str] | None = None,
    ) -> None:
        for variable, value in _UCX_DEFAULTS.items():
            os.environ.setdefault(variable, value)
        try:
            from nixl import _bindings as bindings
        except ImportError as error:
            raise TransferError(f"NIXL cannot be imported, install nixl and nixl-cu12 or nixl-cu13: {error}") from error
        self._bindings = bindings
        self._memory = {"DRAM": bindings.DRAM_SEG, "VRAM": bindings.VRAM_SEG}
        self.name = name
        try:
            self._passive, self._agent = self._make(name, progress_delay_us), self._make(f"{name}-reads", None)
            for agent in (self._passive, self._agent):
                agent.createBackend(backend, backend_options or {})
        except Exception as error:
            raise TransferError(f"NIXL could not start its {backend} plugin: {error}") from error
        self._registered: list[object] = []
        self._scratch = np.zeros(SCRATCH_BYTES, np.uint8)
        start = self._scratch.ctypes.data
        self.register([("DRAM", 0, Span(start, start + SCRATCH_BYTES))])

    def _make(self, name: str, progress_delay_us: int | None) -> Any:
        """A NIXL agent; without a delay there is no progress thread, and nothing happens unless it is polled."""
        # The wrapper class would do, if it did not fix pthrDelay to 0.
        config = self._bindings.nixlAgentConfig()
        config.useProgThread = progress_delay_us is not None
        config.pthrDelay = progress_delay_us or 0
        return self._bindings.nixlAgent(name, config)

    def register(self, regions: Iterable[tuple[str, int, Span]]) -> None:
        """Make memory readable by others and writable by own reads.

        Args:
            regions: (memory, device, byte range), as ``geometry.memory_regions`` gives them.

        Raises:
            TransferError: NIXL refused a region.
        """
        for memory, device, extent in regions:
            rows = [(extent.start, extent.size, device, "")]
            try:
                registration = self._bindings.nixlRegDList(self._memory[memory], rows)
                for agent in (self._passive, self._agent):
                    agent.registerMem(registration, [])
            except Exception as error:
                raise TransferError(f"NIXL cannot register {extent.size} bytes of {memory}: {error}") from error
            self._registered.append(registration)

    def metadata(self) -> bytes:
        """What another agent needs to ``connect`` to this one; taken after ``register``."""
        return bytes(self._passive.getLocalMD())

    def connect(self, metadata: bytes) -> str:
        """Get to know a remote agent; returns its name.

        Raises:
            TransferError: the metadata is not NIXL's, or the agent cannot be reached.
        """
        try:
            name = self._agent.loadRemoteMD(metadata)
            name = name.decode() if isinstance(name, bytes) else str(name)
            self._agent.makeConnection(name, [])
        except Exception as error:
            raise TransferError(f"cannot connect to a remote NIXL agent: {error}") from error
        return name

    def disconnect(self, agent: str) -> None:
        """Forget a remote agent. No read from it may be under way."""
        try:
            self._agent.invalidateRemoteMD(agent)
        except Exception as error:
            logger.warning("NIXL could not forget agent %s: %s", agent, error)

    def read(self, agent: str, ranges: dict[tuple[str, int, str, int], Descriptors]) -> Read:
        """Post READs from ``agent``. Never raises: what was posted before an error must still be waited for.

        Args:
            agent: a name that ``connect`` returned.
            ranges: what ``geometry.descriptors`` returned.
        """
        read = Read(agent)
        for (local_memory, local_device, remote_memory, remote_device), part in ranges.items():
            if not len(part):
                continue
            try:
                local = self._list(local_memory, local_device, part.local, part.sizes)
                remote = self._list(remote_memory, remote_device, part.remote, part.sizes)
                handle = self._agent.createXferReq(self._bindings.NIXL_READ, local, remote, agent, b"", [])
                read.handles.append(handle)
                self._agent.postXferReq(handle, b"")
            except Exception as error:
                read.error = f"cannot post a read from NIXL agent {agent}: {error}"
                break
            read.bytes += part.bytes
            read.descriptors += len(part)
        return read

    def touch(self, agent: str, memory: str, device: int, address: int) -> Read:
        """Post a tiny READ from ``agent`` into memory of its own: connections come about with the first bytes only."""
        one = np.ones(1, np.int64)
        part = Descriptors(one * self._scratch.ctypes.data, one * address, one * SCRATCH_BYTES)
        return self.read(agent, {("DRAM", 0, memory, device): part})

    def poll(self, read: Read) -> bool:
        """Drive ``read``; True once none of its handles can touch memory. Then ``read.error`` tells how it went."""
        read.handles = [handle for handle in read.handles if not self._ended(read, handle)]
        return not read.handles

    def wait(self, read: Read, timeout: float) -> bool:
        """Poll until ``read`` has ended; False if it has not within so many seconds."""
        deadline = time.monotonic() + timeout
        while not self.poll(read):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def _ended(self, read: Read, handle: int) -> bool:
        try:
            status = self._agent.getXferStatus(handle)
            if status == self._bindings.NIXL_IN_PROG:
                return False
            if status != self._bindings.NIXL_SUCCESS:
                read.error = read.error or f"a read from NIXL agent {read.agent} ended with {status}"
        except Exception as error:
            read.error = read.error or f"a read from NIXL agent {read.agent} failed: {error}"
        try:
            self._agent.releaseXferReq(handle)
        except Exception:
            # NIXL refuses to release what it cannot cancel: bytes may still arrive, so the read has not ended.
            return False
        return True

    def _list(self, memory: str, device: int, addresses: np.ndarray, sizes: np.ndarray) -> object:
        rows = np.empty((len(addresses), 3), dtype=np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = addresses, sizes, device
        return self._bindings.nixlXferDList(self._memory[memory], rows)
