"""KV caches filled with a function of (layer, kind, head, token, byte), for any layout.

After a transfer every byte of the consumer's cache is known: the function where the request lies, what was there before
everywhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvferry.geometry import EngineLayout, Fingerprint, LayerShard, WorkerShards, heads_of_rank

Bytes = npt.NDArray[np.uint8]

LAYERS = 5
"""Not divisible by 2, 3 or 4, so that every pipeline but PP 1 has uneven stages."""

STAGES = {
    "producer": {1: (5,), 2: (3, 2), 3: (2, 2, 1), 4: (2, 1, 1, 1)},
    "consumer": {1: (5,), 2: (1, 4), 3: (1, 3, 1), 4: (1, 1, 1, 2)},
}
"""Layers per stage by pipeline size; the two sides cut the layers at different places."""

JUNK_SEED = 20240607


@dataclass(frozen=True)
class Model:
    """What both sides share."""

    name: str
    kind: Literal["attention", "latent"]
    heads: int
    cell_bytes: int
    opaque: bool = False
    order: Literal["HND", "NHD"] = "HND"


@dataclass(frozen=True)
class Side:
    """One engine: its layout, the shape of its cache, and where in it the request lies.

    Attributes:
        tokens: of the request; the last block is partly filled.
        filled: bytes of the request are there (the producer) or to be loaded (the consumer).
    """

    model: Model
    tp: int
    stages: tuple[int, ...]
    block_tokens: int
    num_blocks: int
    tokens: int
    filled: bool

    @property
    def workers(self) -> int:
        return self.tp * len(self.stages)

    @property
    def blocks(self) -> list[int]:
        """Block ids of the request, neither consecutive nor ascending; never the null block."""
        ids = np.random.default_rng(JUNK_SEED + self.num_blocks).permutation(np.arange(1, self.num_blocks))
        return [int(block) for block in ids[: -(-self.tokens // self.block_tokens)]]

    @property
    def valid_tokens(self) -> int:
        """Tokens that are moved: an opaque block moves whole."""
        whole = -(-self.tokens // self.block_tokens) * self.block_tokens
        return whole if self.model.opaque else self.tokens


def make_pair(
    model: Model, producer: tuple[int, int], consumer: tuple[int, int], tokens: int = 75
) -> tuple[Side, Side]:
    """Two sides of (TP, PP) each; they differ in blocks, and in tokens per block where the model lets them."""
    (producer_tp, producer_pp), (consumer_tp, consumer_pp) = producer, consumer
    small = 16 if model.opaque else 12
    return (
        Side(model, producer_tp, STAGES["producer"][producer_pp], 16, 9, tokens, filled=True),
        Side(model, consumer_tp, STAGES["consumer"][consumer_pp], small, 13, tokens, filled=False),
    )


@cache
def truth(model: Model, tokens: int) -> Bytes:
    """What every cell holds: shape (layers, heads, tokens, bytes), different in every cell."""
    layer, head, token, byte = np.ogrid[:LAYERS, : model.heads, :tokens, : model.cell_bytes]
    mixed = (layer * 73856093 ^ head * 19349663 ^ token * 83492791 ^ byte * 39916801) + len(model.kind)
    mixed = (mixed ^ mixed >> 15) * 0x2C1B3C6D & 0xFFFFFFFF
    return np.asarray((mixed ^ mixed >> 13) & 0xFF, dtype=np.uint8)


class WorkerCache:
    """The KV cache of one worker, as it was before the transfer.

    Args:
        memory: where it lies; allocated when not given. Only its first ``cache_bytes`` are used.
    """

    def __init__(self, side: Side, index: int, memory: Bytes | None = None) -> None:
        self.side, self.pp_rank, self.tp_rank = side, *divmod(index, side.tp)
        first = sum(side.stages[: self.pp_rank])
        self.layers = range(first, first + side.stages[self.pp_rank])
        self.heads = heads_of_rank(side.model.heads, side.tp, self.tp_rank)
        cells = (len(self.layers), side.num_blocks, self.heads.size, side.block_tokens, side.model.cell_bytes)
        size = int(np.prod(cells))
        # A margin before and after, where a read that misses its place would show.
        self.memory = np.empty(size + 2 * MARGIN, np.uint8) if memory is None else memory[: size + 2 * MARGIN]
        inside = self.memory[MARGIN : MARGIN + size]
        if side.model.order == "NHD":
            by_token = inside.reshape(cells[0], cells[1], cells[3], cells[2], cells[4])
            self.cells = by_token.transpose(0, 1, 3, 2, 4)
        else:
            self.cells = inside.reshape(cells)
        self.memory[:] = np.random.default_rng(JUNK_SEED + index).integers(0, 256, len(self.memory), np.uint8)
        if side.filled:
            self._write_request()

    def _write_request(self) -> None:
        size, blocks = self.side.block_tokens, self.side.blocks
        tokens = self.side.valid_tokens
        mine = truth(self.side.model, tokens)[self.layers.start : self.layers.stop, slice(*self.heads)]
        for at, block in enumerate(blocks):
            part = mine[:, :, at * size : (at + 1) * size]
            self.cells[:, block, :, : part.shape[2]] = part

    def expected(self) -> Bytes:
        """The whole memory after the transfer, computed from nothing but the side and the function."""
        index = self.pp_rank * self.side.tp + self.tp_rank
        after = WorkerCache(self.side, index)
        if not self.side.filled:
            after._write_request()
        return after.memory

    def shards(self) -> tuple[LayerShard, ...]:
        """What the worker publishes."""
        model = self.side.model
        return tuple(
            LayerShard(
                layer=f"model.layers.{layer}.self_attn.attn",
                kind=model.kind,
                heads=self.heads,
                total_heads=model.heads,
                block_tokens=self.side.block_tokens,
                num_blocks=self.side.num_blocks,
                cell_bytes=model.cell_bytes,
                dtype="float32",
                packing=f"{model.order}-test",
                opaque=model.opaque,
                group=0,
                address=int(cells.ctypes.data),
                block_stride=cells.strides[0],
                head_stride=cells.strides[1],
                token_stride=cells.strides[2],
            )
            for layer, cells in zip(self.layers, self.cells, strict=True)
        )

    def published(self, agent: bytes = b"") -> WorkerShards:
        return WorkerShards(self.pp_rank, self.tp_rank, self.shards(), agent)

    def difference(self) -> str:
        """Where the memory is not as expected, or an empty string."""
        wrong = np.flatnonzero(self.memory != self.expected())
        if not len(wrong):
            return ""
        first = int(wrong[0])
        return f"pp{self.pp_rank}tp{self.tp_rank}: {len(wrong)} of {len(self.memory)} bytes differ, first at {first}"


MARGIN = 4096


def arena_bytes(models: Sequence[Model]) -> int:
    """Enough memory for the cache of any worker of any layout of ``models``."""
    sides = [side for model in models for side in make_pair(model, (1, 1), (1, 1))]
    return max(len(WorkerCache(side, 0).memory) for side in sides)


def make_engine(side: Side, workers: Sequence[WorkerShards]) -> EngineLayout:
    fingerprint = Fingerprint(side.model.name, 1, "0.32")
    return EngineLayout("incarnation", side.tp, len(side.stages), 0, fingerprint, tuple(workers))
