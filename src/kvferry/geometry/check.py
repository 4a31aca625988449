"""Whether one engine's KV cache can be read by another, and if not, every reason."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from kvferry.geometry.layout import EngineLayout, LayerShard
from kvferry.geometry.span import Span

COMPARED = {
    "kind": "use the same model and vLLM on both sides",
    "total_heads": "use the same model on both sides",
    "cell_bytes": "use one --kv-cache-dtype and attention backend on both sides",
    "dtype": "use one --kv-cache-dtype on both sides",
    "packing": "use one attention backend (and kind of processor) on both sides",
    "opaque": "use one attention backend on both sides",
}
"""What must be equal in all shards of a layer, and what to do where it is not."""


def check(producer: EngineLayout, consumer: EngineLayout) -> list[str]:
    """All reasons why ``consumer`` cannot load from ``producer``; empty when it can.

    ``consumer`` may describe only some of its workers: a worker checks for itself.
    """
    reasons = list(_fingerprints(producer, consumer))
    holders = producer.holders()
    for layer, mine in consumer.holders().items():
        theirs = [shard for _, shard in holders.get(layer, [])]
        if not theirs:
            if not all(shard.draft for _, shard in mine):
                reasons.append(f"{layer}: the producer does not hold this layer; use the same model on both sides")
            continue
        for _, shard in mine:
            reasons += _shards(theirs, shard)
    return list(dict.fromkeys(reasons))


def left_out(producer: EngineLayout, consumer: EngineLayout) -> list[str]:
    """Layers of the consumer's drafter that the producer does not hold: their cache is not moved."""
    holders = producer.holders()
    return sorted(layer for layer in consumer.holders() if layer not in holders)


def compatibility(engine: EngineLayout) -> str:
    """A digest that two whole engines share exactly when ``check`` finds nothing about them that differs.

    Parallel sizes, block counts, addresses and, where tokens are separable, block sizes are not in it: engines that
    differ in those can read each other.
    """
    layers = {
        (layer, *(getattr(shard, what) for what in COMPARED), *_block_tokens(shard))
        for layer, holders in engine.holders().items()
        for _, shard in holders
        if not shard.draft
    }
    return hashlib.blake2b(repr((engine.fingerprint, sorted(layers))).encode(), digest_size=8).hexdigest()


def _block_tokens(shard: LayerShard) -> tuple[int, ...]:
    """What of a shard's blocks must be equal: nothing where tokens are separable. A state is one cell of any block."""
    if shard.kind != "state" and shard.opaque:
        return shard.manager_block_tokens, shard.block_tokens
    return (shard.manager_block_tokens,) if shard.kind != "state" and shard.whole else ()


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
    for what, remedy in COMPARED.items():
        there, here = getattr(theirs, what), getattr(mine, what)
        if there != here:
            yield f"{mine.layer}: {what} differs: {there} at the producer, {here} at the consumer; {remedy}"
    there, here = theirs.manager_block_tokens, mine.manager_block_tokens
    if theirs.opaque == mine.opaque and _block_tokens(theirs) != _block_tokens(mine):
        why = (
            f"{mine.packing} does not store tokens separably"
            if mine.opaque
            else "what a prompt leaves of its last block must be loaded too, so as not to be read as numbers it is not"
        )
        yield (
            f"{mine.layer}: blocks of {there} and {here} tokens cannot be paired: {why}; "
            "use one --block-size on both sides"
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
