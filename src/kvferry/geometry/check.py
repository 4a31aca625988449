"""Whether one engine's KV cache can be read by another, and if not, every reason."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.geometry.layout import EngineLayout, LayerShard
from kvferry.geometry.span import Span


def check(producer: EngineLayout, consumer: EngineLayout) -> list[str]:
    """All reasons why ``consumer`` cannot load from ``producer``; empty when it can.

    ``consumer`` may describe only some of its workers: a worker checks for itself.
    """
    reasons = list(_fingerprints(producer, consumer))
    holders = producer.holders()
    for layer, mine in consumer.holders().items():
        theirs = [shard for _, shard in holders.get(layer, [])]
        if not theirs:
            reasons.append(f"{layer}: the producer does not hold this layer")
            continue
        for _, shard in mine:
            reasons += _shards(theirs, shard)
    return list(dict.fromkeys(reasons))


def _fingerprints(producer: EngineLayout, consumer: EngineLayout) -> Iterator[str]:
    theirs, mine = producer.fingerprint, consumer.fingerprint
    for what, there, here in (
        ("model", theirs.model, mine.model),
        ("protocol version", theirs.protocol, mine.protocol),
        ("vLLM version", theirs.software, mine.software),
    ):
        if there != here:
            yield f"{what} differs: {there} at the producer, {here} at the consumer"


def _shards(theirs: list[LayerShard], mine: LayerShard) -> Iterator[str]:
    for shard in theirs:
        yield from _shard(shard, mine)
    missing = uncovered(mine.heads, [shard.heads for shard in theirs])
    if missing:
        yield f"{mine.layer}: no producer worker holds heads {missing}"


def _shard(theirs: LayerShard, mine: LayerShard) -> Iterator[str]:
    for what in ("kind", "total_heads", "cell_bytes", "dtype", "packing", "opaque"):
        there, here = getattr(theirs, what), getattr(mine, what)
        if there != here:
            yield f"{mine.layer}: {what} differs: {there} at the producer, {here} at the consumer"
    there, here = theirs.manager_block_tokens, mine.manager_block_tokens
    if mine.opaque and (there, theirs.block_tokens) != (here, mine.block_tokens):
        yield (
            f"{mine.layer}: blocks of {there} and {here} tokens cannot be paired, "
            f"{mine.packing} does not store tokens separably; use one --block-size on both sides"
        )


def uncovered(wanted: Span, held: list[Span]) -> Span | None:
    """The first part of ``wanted`` that no range of ``held`` covers, or None."""
    at = wanted.start
    for span in sorted(held):
        if span.start > at:
            break
        at = max(at, span.stop)
    if at >= wanted.stop:
        return None
    return Span(at, min([wanted.stop, *(span.start for span in held if span.start > at)]))
