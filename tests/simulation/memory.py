"""KV caches in simulated memory, and a transport that copies between them at its own pace.

Every cell holds a function of (tokens up to its own, layer, head), as if a model had computed it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvferry.errors import TransferError
from kvferry.geometry import Descriptors, LayerShard, Span, TokenShare, WorkerShards, heads_of_rank
from kvferry.transport.nixl import Read

from .world import Party, World

if TYPE_CHECKING:
    from .place import Shape

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Tokens = tuple[int, ...]

LAYERS, HEADS, CELL = 2, 2, 4

MARGIN = 64
"""Bytes before and after a cache that no read may touch."""


@lru_cache(maxsize=1 << 14)
def content(tokens: Tokens) -> Bytes:
    """What the cells of a sequence hold: shape (layers, heads, tokens, bytes)."""
    digests, digest = [], 0
    for token in tokens:
        digest = (digest * 0x9E3779B1 ^ (token + 1) * 0x85EBCA77) & 0xFFFFFFFF
        digest ^= digest >> 15
        digests.append(digest)
    layer, head = np.ogrid[:LAYERS, :HEADS]
    cells = (np.asarray(digests) * 0x2AE3D + (layer * 7919 + head * 104729)[..., None]) & 0xFFFFFFFF
    return cells.astype("<u4").view(np.uint8).reshape(LAYERS, HEADS, len(tokens), CELL)


class Cache:
    """The KV cache of the worker at (pp_rank, tp_rank), somewhere in the world's memory.

    Attributes:
        address: of block 0.
        block_tokens: over all context parallel ranks.
        cells: shape (layers, blocks, heads, tokens of a block that are held, bytes).
    """

    def __init__(self, rank: tuple[int, int], shape: Shape, address: int) -> None:
        self.pp_rank, self.tp_rank = rank
        size = LAYERS // shape.pp
        self.layers = range(self.pp_rank * size, (self.pp_rank + 1) * size)
        self.heads = heads_of_rank(HEADS, shape.tp, self.tp_rank)
        self.share = TokenShare(shape.dcp, self.tp_rank % shape.dcp, shape.interleave)
        self.address, self.block_tokens = address, shape.block_tokens
        sizes = (size, shape.blocks, self.heads.size, shape.block_tokens // shape.dcp, CELL)
        self.memory = np.full(int(np.prod(sizes)) + 2 * MARGIN, 0xEE, np.uint8)
        self.cells = self.memory[MARGIN:-MARGIN].reshape(sizes)

    def shards(self) -> tuple[LayerShard, ...]:
        layer_bytes, block, head, token, _ = self.cells.strides
        return tuple(
            LayerShard(
                layer=f"model.layers.{layer}.attn",
                kind="attention",
                heads=self.heads,
                total_heads=HEADS,
                block_tokens=self.cells.shape[3],
                share=self.share,
                num_blocks=self.cells.shape[1],
                cell_bytes=CELL,
                dtype="float16",
                packing="simulated",
                opaque=False,
                group=0,
                address=self.address + index * layer_bytes,
                block_stride=block,
                head_stride=head,
                token_stride=token,
            )
            for index, layer in enumerate(self.layers)
        )

    def published(self, agent: bytes = b"") -> WorkerShards:
        return WorkerShards(self.pp_rank, self.tp_rank, self.shards(), agent)

    def write(self, blocks: list[int], tokens: Tokens, span: Span) -> None:
        """Compute the cells of ``span`` of a sequence that lies in ``blocks``."""
        block, place, mine = self._cells(blocks, tokens, span)
        self.cells[:, block, :, place] = mine

    def holds(self, blocks: list[int], tokens: Tokens, count: int) -> bool:
        """Whether ``blocks`` hold the first ``count`` tokens of a sequence, and nothing wrote past the cache."""
        block, place, mine = self._cells(blocks, tokens, Span(0, count))
        return bool(np.array_equal(self.cells[:, block, :, place], mine))

    def _cells(self, blocks: list[int], tokens: Tokens, span: Span) -> tuple[Ints, Ints, Bytes]:
        """Of what this worker holds of ``span``: block, place in it, and what belongs there (token, layer, head, byte).

        By the formula of vLLM's slot mapping.
        """
        at = np.arange(*span)
        size, rank, interleave = self.share
        offset = at % self.block_tokens
        own = offset // interleave % size == rank
        at, offset = at[own], offset[own]
        mine = content(tokens)[self.layers.start : self.layers.stop, self.heads.start : self.heads.stop, at]
        place = offset // (size * interleave) * interleave + offset % interleave
        return np.asarray(blocks, np.int64)[at // self.block_tokens], place, mine.transpose(2, 0, 1, 3)

    def intact(self) -> bool:
        """Whether nothing was written outside the cache."""
        return bool((self.memory[:MARGIN] == 0xEE).all() and (self.memory[-MARGIN:] == 0xEE).all())

    def at(self, address: int, size: int) -> Bytes:
        start = address - self.address + MARGIN
        assert 0 <= start <= len(self.memory) - size, f"address {address:#x} is outside the memory"
        return self.memory[start : start + size]

    def blocks_at(self, address: int, size: int) -> range:
        """Blocks that a range of one layer touches."""
        layer, block = self.cells.strides[:2]
        offset = (address - self.address) % layer
        return range(offset // block, (offset + size - 1) // block + 1)


@dataclass(slots=True, eq=False)
class Handle:
    """One posted read.

    Attributes:
        rows: what is still to be copied, as (local address, remote address, bytes).
        blocks: local blocks it writes.
        stalled: it met a partition.
    """

    remote: Agent
    rows: list[tuple[int, int, int]]
    blocks: set[int]
    error: str | None = None
    ended: bool = False
    stalled: bool = False


class Fabric:
    """All agents of the world and how fast the transport is.

    Args:
        connected: whether two hosts reach each other now.
        slowest: seconds that a read may take.
    """

    ADDRESS_SPACE = 1 << 32
    RETRY_S = 0.25
    KEEPALIVE_S = 4.0

    def __init__(self, world: World, connected: Callable[[str, str], bool], slowest: float) -> None:
        self.world, self.connected, self.slowest = world, connected, slowest
        self.agents: dict[str, Agent] = {}
        self._numbers = itertools.count(1)

    def address(self) -> int:
        """Where a new cache may lie; addresses are not used twice."""
        return next(self._numbers) * self.ADDRESS_SPACE


class Agent:
    """Stands for ``kvferry.transport.nixl.Agent``: copies piecewise, later, whatever is in the memory by then.

    Args:
        party: of whose process it is; a dead process is neither read nor written.
        on_write: told the local blocks before bytes arrive in them.
        on_end: told the local blocks of a handle that has ended.
    """

    def __init__(
        self,
        fabric: Fabric,
        host: str,
        party: Party,
        cache: Cache,
        on_write: Callable[[set[int]], None],
        on_end: Callable[[set[int]], None],
    ) -> None:
        self.host, self.party, self.cache = host, party, cache
        self.open: set[Handle] = set()
        self._fabric, self._world = fabric, fabric.world
        self._on_write, self._on_end = on_write, on_end
        self._handles: dict[int, Handle] = {}
        self._numbers = itertools.count()
        self._registered: list[Span] = []
        self.name = f"{host}-{cache.address:x}"
        fabric.agents[self.name] = self

    def register(self, regions: Iterable[tuple[str, int, Span]]) -> None:
        self._registered += [extent for _, _, extent in regions]

    def metadata(self) -> bytes:
        return self.name.encode()

    def connect(self, metadata: bytes) -> str:
        name = metadata.decode()
        if not self._fabric.agents[name].party.alive:
            raise TransferError(f"agent {name} cannot be reached")
        return name

    def disconnect(self, agent: str) -> None:
        assert not any(handle.remote.name == agent for handle in self.open), f"{agent} is forgotten while it is read"

    def read(self, agent: str, ranges: dict[tuple[str, int, str, int], Descriptors]) -> Read:
        read = Read(agent)
        remote = self._fabric.agents[agent]
        for part in ranges.values():
            rows = list(zip(part.local.tolist(), part.remote.tolist(), part.sizes.tolist(), strict=True))
            cut = self._world.random.randint(0, len(rows))
            for piece in (rows[:cut], rows[cut:]):
                if piece:
                    read.handles.append(self._post(remote, piece))
            read.bytes += part.bytes
            read.descriptors += len(part)
        return read

    def touch(self, agent: str, memory: str, device: int, address: int) -> Read:
        """A read into nobody's memory, that ends some time."""
        number = next(self._numbers)
        handle = self._handles[number] = Handle(self._fabric.agents[agent], [], set())
        self.open.add(handle)
        self._world.at(self._world.soon(self._fabric.slowest), lambda: self._end(handle, None), self.party)
        return Read(agent, [number])

    def poll(self, read: Read) -> bool:
        for number in read.handles:
            if self._handles[number].ended:
                read.error = read.error or self._handles[number].error
        read.handles = [number for number in read.handles if not self._handles[number].ended]
        return not read.handles

    def _post(self, remote: Agent, rows: list[tuple[int, int, int]]) -> int:
        for local, remote_address, size in rows:
            for agent, address in ((self, local), (remote, remote_address)):
                inside = any(extent.start <= address and address + size <= extent.stop for extent in agent._registered)
                assert inside, f"{size} bytes at {address:#x} are not registered by {agent.name}"
        blocks = {block for local, _, size in rows for block in self.cache.blocks_at(local, size)}
        number = next(self._numbers)
        handle = self._handles[number] = Handle(remote, rows, blocks)
        self.open.add(handle)
        self._world.at(self._world.soon(self._fabric.slowest), lambda: self._go_on(handle), self.party)
        return number

    def _go_on(self, handle: Handle) -> None:
        """Copy some of the rest, wait out a partition, or notice that the other side is dead or reset."""
        world, remote = self._world, handle.remote
        if not remote.party.alive:
            world.cover("reader:reading", "peer died")
            world.at(world.soon(self._fabric.KEEPALIVE_S), lambda: self._end(handle, "peer died"), self.party)
        elif not self._fabric.connected(self.host, remote.host):
            world.cover("reader:reading", "partition")
            handle.stalled = True
            world.at(self._fabric.RETRY_S, lambda: self._go_on(handle), self.party)
        elif handle.stalled and world.chance(0.3):
            world.cover("reader:reading", "reset")
            self._end(handle, "connection reset")
        else:
            count = world.random.randint(1, len(handle.rows))
            self._copy(handle, handle.rows[:count])
            del handle.rows[:count]
            if handle.rows:
                world.at(world.soon(self._fabric.slowest), lambda: self._go_on(handle), self.party)
            else:
                self._end(handle, None)

    def _copy(self, handle: Handle, rows: list[tuple[int, int, int]]) -> None:
        self._on_write(handle.blocks)
        for local, remote, size in rows:
            self.cache.at(local, size)[:] = handle.remote.cache.at(remote, size)

    def _end(self, handle: Handle, error: str | None) -> None:
        handle.ended, handle.error = True, error
        self.open.remove(handle)
        self._on_end(handle.blocks)
