"""What each worker of an engine core holds of the KV cache, as plain data.

The join key between two engines is the global layer name, never an index into a list and never a rank formula.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from kvferry.geometry.span import ALL_TOKENS, Span, TokenShare

Kind = Literal["attention", "latent", "state"]

NULL_BLOCK = 0
"""Block id that vLLM puts where a request holds no block (out of a sliding window); it is never moved."""

ADDRESS_LIMIT = 2**62
"""Addresses and sizes from a peer stay below this, so that no sum of two leaves a signed 64 bit integer."""


@dataclass(frozen=True, slots=True)
class LayerShard:
    """The box of one layer's KV cache that one worker holds: all its blocks x a head range x the tokens of a block.

    A *cell* is what the cache stores for one (head, token): K and V together, or one latent vector. The byte address
    of a cell is ``address + block * block_stride + (head - heads.start) * head_stride + token * token_stride``. Of a
    context parallel rank ``token`` counts those of its share.

    A recurrent state has one cell for (head, block): the state after the last token of the request that the block
    stands for. Its token stride is 0. A layer has several such states, each a shard with a name of its own.

    Attributes:
        layer: global layer name, such as ``model.layers.17.self_attn.attn``.
        kind: ``attention`` (K and V per head), ``latent`` (one vector per token, MLA) or ``state`` (recurrent).
        heads: global heads held; several workers may hold the same ones. Of a state, what tensor parallelism cuts it
            into: heads or channels.
        total_heads: heads of the layer over all workers.
        block_tokens: tokens per (kernel) block, as many as the worker holds of them.
        num_blocks: (kernel) blocks in the cache, the null block included.
        cell_bytes: bytes of one cell.
        dtype: element type, such as ``float32``; compared, never interpreted.
        packing: how the attention backend arranges a block; both sides must name the same.
        opaque: tokens inside a (block, head) slab cannot be told apart, so only whole slabs move.
        group: index of the KV cache group whose block ids address this layer.
        split: kernel blocks per block of the KV cache manager (whose ids travel).
        share: of the tokens, with context parallelism; all of them otherwise.
        whole: a block is loaded to its end, also past the last token. vLLM zeroes new blocks where their old content
            may be no number of this type, and leaves those that are loaded to whoever loads them.
        address: byte address of block 0, first head held, token 0.
        block_stride, head_stride, token_stride: bytes.
        draft: the layer is a speculative decoder's. A wrong cache there makes worse guesses, which the model finds out:
            never a wrong token. So where only one side has the layer, it is left out.
        memory: ``DRAM`` or ``VRAM``, NIXL's words.
        device: device index of the memory, from the tensor itself.
    """

    layer: str
    kind: Kind
    heads: Span
    total_heads: int
    block_tokens: int
    num_blocks: int
    cell_bytes: int
    dtype: str
    packing: str
    opaque: bool
    group: int
    address: int
    block_stride: int
    head_stride: int
    token_stride: int
    split: int = 1
    share: TokenShare = ALL_TOKENS
    whole: bool = False
    draft: bool = False
    memory: str = "DRAM"
    device: int = 0

    def __post_init__(self) -> None:
        # Shards also come from peers, so nothing about them is taken on trust.
        object.__setattr__(self, "heads", Span(*self.heads))
        object.__setattr__(self, "share", TokenShare(*self.share))
        if not (0 <= self.heads.start < self.heads.stop <= self.total_heads):
            raise ValueError(f"{self.layer}: heads {self.heads} are not within the layer's {self.total_heads}")
        positive = (self.block_tokens, self.num_blocks, self.cell_bytes, self.split)
        if min(positive) < 1 or self.num_blocks % self.split:
            raise ValueError(f"{self.layer}: block_tokens, num_blocks, cell_bytes, split = {positive} make no cache")
        share = self.share
        if not 0 <= share.rank < share.size or share.interleave < 1 or self.held_block_tokens % share.interleave:
            raise ValueError(
                f"{self.layer}: context parallel rank {share.rank} of {share.size} cannot fill blocks of "
                f"{self.held_block_tokens} tokens {share.interleave} at a time; use a --cp-kv-cache-interleave-size "
                "that divides --block-size"
            )
        if min(self.address, self.block_stride, self.head_stride, self.token_stride, self.group) < 0:
            raise ValueError(f"{self.layer}: negative address, stride or group")
        # A huge stride of a dimension of one, or many cells at stride 0, would not show in the extent.
        strides = (self.block_stride, self.head_stride, self.token_stride)
        counts = (self.total_heads, self.num_blocks, self.manager_block_tokens)
        largest = max(self.extent.stop, *strides, *counts)
        if largest > ADDRESS_LIMIT:
            raise ValueError(f"{self.layer}: addresses, sizes or strides up to {largest:#x} fit no memory")
        if (self.kind == "state") != (self.token_stride == 0) or (self.kind == "state" and share.size > 1):
            raise ValueError(
                f"{self.layer}: a {self.kind} with a token stride of {self.token_stride}, shared by {share.size} ranks"
            )
        if self.opaque and self.token_stride != self.cell_bytes:
            raise ValueError(f"{self.layer}: an opaque slab must be contiguous; set VLLM_KV_CACHE_LAYOUT=HND")

    @property
    def manager_blocks(self) -> int:
        """Blocks as the KV cache manager counts them; ids run over ``range(manager_blocks)``."""
        return self.num_blocks // self.split

    @property
    def held_block_tokens(self) -> int:
        """Tokens that this worker holds of a block of the KV cache manager."""
        return self.block_tokens * self.split

    @property
    def manager_block_tokens(self) -> int:
        """Tokens per block of the KV cache manager, over all context parallel ranks."""
        return self.block_tokens * self.split * self.share.size

    @property
    def extent(self) -> Span:
        """Byte range from the first to past the last cell."""
        last = (
            (self.num_blocks - 1) * self.block_stride
            + (self.heads.size - 1) * self.head_stride
            + (self.block_tokens - 1) * self.token_stride
        )
        return Span(self.address, self.address + last + self.cell_bytes)


Holders = list[tuple[int, LayerShard]]
"""Index into the workers of an engine, and what that worker holds of a layer."""


@dataclass(frozen=True, slots=True)
class WorkerShards:
    """What the worker at (pp_rank, tp_rank) holds, and the NIXL agent through which it can be read.

    With prefill context parallelism, whose ranks have a tensor parallel rank of their own each, ``tp_rank`` counts on
    from one such rank to the next.
    """

    pp_rank: int
    tp_rank: int
    shards: tuple[LayerShard, ...]
    agent: bytes = field(default=b"", repr=False)

    @property
    def name(self) -> str:
        """The worker in messages to people: ``pp1tp0``."""
        return f"pp{self.pp_rank}tp{self.tp_rank}"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What two engines must share for one's KV cache to mean anything to the other.

    Attributes:
        model: identity of the model's weights and configuration.
        protocol: version of the side-channel protocol.
        software: vLLM's minor version, ``0.32``.
    """

    model: str
    protocol: int
    software: str


def layout_label(tp: int, pp: int, dp_rank: int) -> str:
    """``EngineLayout.label`` of an engine that cannot be described yet."""
    return f"tp{tp}pp{pp}dp{dp_rank}"


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """One engine core: its parallel sizes, its workers and its identity.

    Attributes:
        incarnation: drawn at each start of the engine core; peers are keyed by it.
        tp, pp: tensor and pipeline parallel size.
        dp_rank: which data parallel engine core this is; for people, never for addressing.
        workers: one entry per (pp_rank, tp_rank).
    """

    incarnation: str
    tp: int
    pp: int
    dp_rank: int
    fingerprint: Fingerprint
    workers: tuple[WorkerShards, ...]

    @property
    def label(self) -> str:
        """The parallel sizes in messages to people: ``tp2pp2dp0``."""
        return layout_label(self.tp, self.pp, self.dp_rank)

    def holders(self) -> dict[str, Holders]:
        """For every layer, who holds a part of it: (index into ``workers``, shard)."""
        holders: dict[str, Holders] = {}
        for index, worker in enumerate(self.workers):
            for shard in worker.shards:
                holders.setdefault(shard.layer, []).append((index, shard))
        return holders


def by_share(holders: Holders) -> dict[Span, dict[TokenShare, Holders]]:
    """Holders of one layer by what they hold of it; several of the same heads and tokens are replicas of each other."""
    held: dict[Span, dict[TokenShare, Holders]] = {}
    for holder in holders:
        _, shard = holder
        held.setdefault(shard.heads, {}).setdefault(shard.share, []).append(holder)
    return held


def memory_regions(shards: Iterable[LayerShard]) -> list[tuple[str, int, Span]]:
    """The fewest (memory, device, byte range) that cover all ``shards``, for registration with the transport.

    Layers are often views into one buffer, so ranges that touch or overlap are one region.
    """
    ranges = sorted((shard.memory, shard.device, shard.extent) for shard in shards)
    return list(_joined(ranges))


def _joined(ranges: list[tuple[str, int, Span]]) -> Iterator[tuple[str, int, Span]]:
    current: tuple[str, int, Span] | None = None
    for memory, device, extent in ranges:
        if current and current[:2] == (memory, device) and extent.start <= current[2].stop:
            current = (memory, device, Span(current[2].start, max(current[2].stop, extent.stop)))
            continue
        if current:
            yield current
        current = (memory, device, extent)
    if current:
        yield current
