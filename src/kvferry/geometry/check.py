"""Whether one engine's KV cache can be read by another, and if not, every reason."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator

from kvferry.geometry.layout import EngineLayout, Holders, LayerShard, by_share
from kvferry.geometry.span import Span, TokenShare

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
        theirs = holders.get(layer)
        if theirs is None:
            if not all(shard.draft for _, shard in mine):
                reasons.append(f"{layer}: the producer does not hold this layer; use the same model on both sides")
            continue
        held = by_share(theirs)
        partial = [heads for heads, shares in held.items() if not complete(shares)]
        for _, shard in mine:
            reasons += _shards(theirs, list(held), partial, shard)
    return list(dict.fromkeys(reasons))


def left_out(producer: EngineLayout, consumer: EngineLayout) -> list[str]:
    """Layers of the consumer's drafter that the producer does not hold: their cache is not moved."""
    holders = producer.holders()
    return sorted(layer for layer in consumer.holders() if layer not in holders)


def compatibility(engine: EngineLayout) -> str:
    """A digest that two whole engines share exactly when ``check`` finds nothing about them that differs.

    Parallel sizes, block counts, addresses and, where tokens are separable, block sizes and how tokens are shared out
    are not in it: engines that differ in those can read each other.
    """
    layers = {
        (layer, *(getattr(shard, what) for what in COMPARED), *_blocks(shard))
        for layer, holders in engine.holders().items()
        for _, shard in holders
        if not shard.draft
    }
    return hashlib.blake2b(repr((engine.fingerprint, sorted(layers))).encode(), digest_size=8).hexdigest()


def _blocks(shard: LayerShard) -> tuple[int, ...]:
    """What of a shard's blocks must be equal: nothing where tokens are separable. A state is one cell of any block.

    Which tokens lie in an opaque slab: of context parallel ranks, that depends on how they share them out, unless each
    slab holds a run of them.
    """
    if shard.kind == "state":
        return ()
    if shard.opaque:
        share = shard.share
        mixed = () if share.consecutive(shard.block_tokens) else (share.size, share.interleave)
        return (shard.held_block_tokens, shard.block_tokens, *mixed)
    return (shard.manager_block_tokens,) if shard.whole else ()


def _fingerprints(producer: EngineLayout, consumer: EngineLayout) -> Iterator[str]:
    theirs, mine = producer.fingerprint, consumer.fingerprint
    for what, there, here in (
        ("model", theirs.model, mine.model),
        ("protocol version", theirs.protocol, mine.protocol),
        ("vLLM version", theirs.software, mine.software),
    ):
        if there != here:
            yield f"{what} differs: {there} at the producer, {here} at the consumer"


def _shards(theirs: Holders, held: list[Span], partial: list[Span], mine: LayerShard) -> Iterator[str]:
    """Of one layer; of the heads ``partial`` the producer does not hold all tokens."""
    for _, shard in theirs:
        yield from _shard(shard, mine)
    missing = uncovered(mine.heads, held)
    if missing:
        yield f"{mine.layer}: no producer worker holds heads {missing}"
    if any(heads & mine.heads for heads in partial):
        yield f"{mine.layer}: the producer's workers do not hold all tokens; use one context parallelism in all of them"


def _shard(theirs: LayerShard, mine: LayerShard) -> Iterator[str]:
    for what, remedy in COMPARED.items():
        there, here = getattr(theirs, what), getattr(mine, what)
        if there != here:
            yield f"{mine.layer}: {what} differs: {there} at the producer, {here} at the consumer; {remedy}"
    if theirs.opaque != mine.opaque or _blocks(theirs) == _blocks(mine):
        return
    why = (
        f"{mine.packing} does not store tokens separably"
        if mine.opaque
        else "what a prompt leaves of its last block must be loaded too, so as not to be read as numbers it is not"
    )
    sizes = f"blocks of {_size(theirs)} and {_size(mine)} tokens"
    yield f"{mine.layer}: {sizes} cannot be paired: {why}; use one {_remedy(theirs, mine)} on both sides"


def _size(shard: LayerShard) -> str:
    """Tokens in a block, and how context parallel ranks share them."""
    share = shard.share
    ranks = f" x {share.size} ranks ({share.interleave} at a time)" if share.size > 1 else ""
    return f"{shard.held_block_tokens}{ranks}"


def _remedy(theirs: LayerShard, mine: LayerShard) -> str:
    if theirs.share.size == mine.share.size == 1:
        return "--block-size"
    if not mine.opaque:
        return "product of --block-size and --decode-context-parallel-size"
    return "--block-size, --decode-context-parallel-size and --cp-kv-cache-interleave-size"


def complete(shares: Collection[TokenShare]) -> bool:
    """Whether every token is in exactly one of ``shares``."""
    first = next(iter(shares))
    alike = first.size == 1 or len({(share.size, share.interleave) for share in shares}) == 1
    return alike and len(shares) == first.size


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
