"""What a KV cache is cut into: half-open ranges, and the shares of context parallel ranks."""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Tokens = TypeVar("Tokens", int, Ints)


class Span(NamedTuple):
    """The half-open range ``[start, stop)`` of heads, tokens or bytes; falsy when empty."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return max(0, self.stop - self.start)

    def __bool__(self) -> bool:
        return self.stop > self.start

    def __and__(self, other: Span) -> Span:
        """The part that lies in both; falsy where they do not meet."""
        return Span(max(self.start, other.start), min(self.stop, other.stop))

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"


class TokenShare(NamedTuple):
    """The tokens that a context parallel rank holds: ``interleave`` of them, then as many for each other rank.

    Those it holds lie in its blocks one after the other, as if there were no others. So with ``size`` ranks a block id
    stands for ``size`` times as many tokens as a rank's block holds. The formulas are those of vLLM's slot mapping
    (``compute_slot_mappings`` in ``v1/worker/gpu/block_table.py``), where a block is a whole number of interleaves.

    Attributes:
        size, rank: of decode context parallelism. One rank holds everything.
        interleave: tokens.
    """

    size: int = 1
    rank: int = 0
    interleave: int = 1

    def holds(self, tokens: Ints) -> npt.NDArray[np.bool_]:
        """Which of these positions are held."""
        return np.equal(self.owner(tokens), self.rank)

    def owner(self, tokens: Ints) -> Ints:
        """The rank that holds each of these positions."""
        return tokens // self.interleave % self.size

    def place(self, tokens: Tokens) -> Tokens:
        """Where each of these positions, which are held, comes among all that are."""
        if self.size == 1:
            return tokens
        return tokens // (self.interleave * self.size) * self.interleave + tokens % self.interleave

    def position(self, places: Tokens) -> Tokens:
        """The inverse of ``place``."""
        if self.size == 1:
            return places
        return (places // self.interleave * self.size + self.rank) * self.interleave + places % self.interleave

    def before(self, token: int) -> int:
        """How many of the positions before ``token`` are held."""
        if self.size == 1:
            return token
        rounds, rest = divmod(token, self.interleave * self.size)
        return rounds * self.interleave + min(max(rest - self.rank * self.interleave, 0), self.interleave)

    def consecutive(self, block_tokens: int) -> bool:
        """Whether each run of ``block_tokens`` held ones is a run of positions."""
        return self.size == 1 or self.interleave % block_tokens == 0

    def step(self, block_tokens: int) -> int:
        """A number of tokens such that positions between two multiples of it are held together in a block, or not."""
        return block_tokens if self.size == 1 else math.gcd(self.interleave, block_tokens)

    def meets(self, other: TokenShare) -> bool:
        """Whether there is a position that both hold."""
        if self.size == 1 or other.size == 1:
            return True
        # Their runs begin at rank * interleave, and again and again; what matters is how far apart two can begin.
        period = math.gcd(self.size * self.interleave, other.size * other.interleave)
        apart = (self.rank * self.interleave - other.rank * other.interleave) % period
        return apart < other.interleave or period - apart < self.interleave


ALL_TOKENS = TokenShare()
"""Of a worker without context parallelism."""


def heads_of_rank(total_heads: int, tp_size: int, tp_rank: int) -> Span:
    """Global KV heads that tensor parallel rank ``tp_rank`` of ``tp_size`` holds.

    vLLM cuts the heads into ``min(tp_size, total_heads)`` shards and gives ranks beyond that replicas, consecutive
    ranks sharing a shard (``QKVParallelLinear``, ``num_kv_head_replicas``). A latent cache is the case of one head.

    Raises:
        ValueError: a size below one, or a rank outside ``range(tp_size)``.
    """
    if total_heads < 1 or tp_size < 1 or not 0 <= tp_rank < tp_size:
        raise ValueError(f"no heads for {total_heads=}, {tp_size=}, {tp_rank=}")
    shards = min(tp_size, total_heads)
    shard = tp_rank * shards // tp_size
    return Span(shard * total_heads // shards, (shard + 1) * total_heads // shards)
