"""Half-open integer ranges, the one shape everything in a KV cache is cut into."""

from __future__ import annotations

from typing import NamedTuple


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
