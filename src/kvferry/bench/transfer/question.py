"""What is asked: pairs of layouts, a cache, sizes, a transport."""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import psutil

from kvferry.cluster.blueprint import Blocks, CacheShape, blueprint
from kvferry.cluster.spec import Layout
from kvferry.errors import SpecError
from kvferry.geometry import EngineLayout

MOST_TOKENS = 10_000_000
MOST_BLOCK_TOKENS = 4096
MOST_WORKERS = 64
SPARE = 4
"""A cache has a block more for each so many that the longest prompt takes, so that scattered blocks have gaps."""


class Transport(StrEnum):
    """What UCX may take; ``auto`` leaves it to UCX and its environment."""

    AUTO = "auto"
    SHM = "shm"
    TCP = "tcp"

    @property
    def variables(self) -> dict[str, str]:
        """NIXL asks UCX to notice when a peer fails, which of these only TCP can: it carries UCX's own messages."""
        lists = {Transport.SHM: "shm,self,tcp", Transport.TCP: "tcp,self"}
        return {"UCX_TLS": lists[self]} if self in lists else {}


class Order(StrEnum):
    """How the blocks of a prompt lie in a cache: one after the other, or anywhere."""

    SCATTERED = "scattered"
    CONTIGUOUS = "contiguous"


class What(StrEnum):
    """What is measured."""

    PAIRS = "pairs"
    CONTACT = "contact"
    ACKS = "acks"
    GROWTH = "growth"


@dataclass(frozen=True)
class Pair:
    """Layouts of a producer and a consumer, one engine core each."""

    producer: Layout
    consumer: Layout

    @classmethod
    def parse(cls, text: str) -> "Pair":
        """Read ``tp=2,pp=2:tp=4``.

        Raises:
            SpecError: it is no pair, or a layout that cannot be measured.
        """
        sides = text.split(":")
        if len(sides) != 2:
            raise SpecError(f"{text!r} is not a pair of layouts PRODUCER:CONSUMER, such as tp=2,pp=2:tp=4")
        pair = cls(*map(Layout.parse, sides))
        for layout in (pair.producer, pair.consumer):
            if layout.dp > 1:
                raise SpecError(f"{layout}: a prompt moves from one engine core to one, so there is no dp to measure")
            if max(layout.pcp, layout.dcp) > 1:
                raise SpecError(f"{layout}: pairs with context parallelism (pcp, dcp) are not measured")
            if layout.workers > MOST_WORKERS:
                raise SpecError(f"{layout}: {layout.workers} workers are more than {MOST_WORKERS} processes")
        return pair

    @property
    def label(self) -> str:
        return f"{self.producer.label} -> {self.consumer.label}"

    @property
    def is_equal(self) -> bool:
        return self.producer == self.consumer


PAIRS = ("tp=1:tp=1", "tp=2,pp=2:tp=4", "tp=4:pp=4", "tp=3:tp=2")


@dataclass(frozen=True)
class Question:
    """What each pair is asked.

    Attributes:
        tokens: lengths of prompts.
        rounds: how often each pair's processes are started and measured.
    """

    shape: CacheShape
    pairs: tuple[Pair, ...]
    tokens: tuple[int, ...]
    block_tokens: int = 16
    rounds: int = 5
    transport: Transport = Transport.AUTO
    order: Order = Order.SCATTERED
    _blocks: Blocks = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.block_tokens <= MOST_BLOCK_TOKENS:
            raise SpecError(f"blocks of {self.block_tokens} tokens are not between 1 and {MOST_BLOCK_TOKENS}")
        if not self.tokens or not all(1 <= tokens <= MOST_TOKENS for tokens in self.tokens):
            raise SpecError(f"prompts of {self.tokens} tokens are not between 1 and {MOST_TOKENS}")
        longest = self.blocks_of(max(self.tokens))
        object.__setattr__(self, "_blocks", Blocks(self.block_tokens, 2 + longest + longest // SPARE))
        for pair in self.pairs:
            self._require_fit(pair)

    def _require_fit(self, pair: Pair) -> None:
        for layout in (pair.producer, pair.consumer):
            if layout.partition is not None and sum(layout.partition) != self.shape.layers:
                raise SpecError(f"{layout}: the partition does not add up to {self.shape.layers} layers")
            if layout.pp > self.shape.layers:
                raise SpecError(f"{layout}: {self.shape.layers} layers are too few")
        # Also what the consumers copy into, to have the speed of a copy.
        needed = sum(cache_bytes(self.engine(layout)) for layout in (pair.producer, pair.consumer, pair.consumer))
        if needed > (there := psutil.virtual_memory().available):
            raise SpecError(f"{pair.label} needs {needed / 1e9:.3g} GB of memory, {there / 1e9:.3g} GB are there")

    def blocks_of(self, tokens: int) -> int:
        """How many blocks a prompt takes."""
        return -(-tokens // self.block_tokens)

    def engine(self, layout: Layout) -> EngineLayout:
        """What an engine core of that layout holds, at addresses that are made up."""
        return blueprint(self.shape, layout, self._blocks)

    def ids(self, tokens: int, seed: int) -> list[int]:
        """Block ids of a prompt, never the null block; the same for a seed."""
        there = np.arange(1, self._blocks.count)
        if self.order is Order.SCATTERED:
            there = np.random.default_rng(seed).permutation(there)
        return [int(block) for block in there[: self.blocks_of(tokens)]]


def cache_bytes(engine: EngineLayout) -> int:
    """Memory of all workers of an engine."""
    return sum(shard.extent.size for worker in engine.workers for shard in worker.shards)
