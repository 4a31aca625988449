"""From a plan and two block lists to the byte ranges that move, as numpy arrays.

Blocks are paired by absolute token position: block ``i`` of a list holds the tokens from ``i * tokens per block`` on,
or a context parallel rank's share of them.
The number of ranges drives the cost of a transfer on a fast link, so ranges that continue each other on both sides are
one, across heads, blocks and layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.errors import LayoutError
from kvferry.geometry.layout import NULL_BLOCK, LayerShard
from kvferry.geometry.plan import Piece
from kvferry.geometry.span import Ints, Span

Blocks = Sequence[Sequence[int]]
"""Block ids by KV cache group."""


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Byte ranges to copy: row ``i`` of ``remote`` goes to row ``i`` of ``local``.

    Attributes:
        local, remote: start addresses, shape (n,).
        sizes: bytes, shape (n,).
    """

    local: Ints
    remote: Ints
    sizes: Ints

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def bytes(self) -> int:
        return int(self.sizes.sum())


def descriptors(
    pieces: Iterable[Piece], remote_blocks: Blocks, local_blocks: Blocks, tokens: Span
) -> dict[tuple[str, int, str, int], Descriptors]:
    """Byte ranges of ``tokens`` for the ``pieces`` read from one remote worker.

    Args:
        pieces: what the plan reads from that worker.
        remote_blocks, local_blocks: block ids of the request on each side, by KV cache group, from token 0 on.
        tokens: absolute positions to move, as far as both workers hold them. Must start at a block boundary where the
            cache is opaque inside a block. Of a recurrent state, the one after the last of them moves.

    Returns:
        Ranges by (local memory, local device, remote memory, remote device).

    Raises:
        LayoutError: ``tokens`` cannot be cut out, or a block list is too short, names a block outside the cache, or
            lacks a block the other side needs.
    """
    if tokens.start < 0:
        raise LayoutError(f"tokens {tokens} start before the request")
    families: dict[tuple[object, ...], list[Piece]] = defaultdict(list)
    for piece in pieces:
        families[_family(piece)].append(piece)
    parts: dict[tuple[str, int, str, int], list[Descriptors]] = defaultdict(list)
    for family in families.values():
        local, remote = family[0].local, family[0].remote
        place = (local.memory, local.device, remote.memory, remote.device)
        parts[place].append(_ranges(family, remote_blocks, local_blocks, tokens))
    return {place: _merge(ranges) for place, ranges in parts.items()}


def _family(piece: Piece) -> tuple[object, ...]:
    """Pieces that differ only in their base addresses, in practice one layer after the other."""

    def shape(shard: LayerShard) -> tuple[object, ...]:
        return (
            *(shard.kind, shard.group, shard.block_tokens, shard.num_blocks, shard.split, shard.share),
            *(shard.opaque, shard.whole),
            *(shard.block_stride, shard.head_stride, shard.token_stride, shard.memory, shard.device),
        )

    return (piece.heads.size, piece.local.cell_bytes, *shape(piece.local), *shape(piece.remote))


def _ranges(family: list[Piece], remote_blocks: Blocks, local_blocks: Blocks, tokens: Span) -> Descriptors:
    """Unmerged ranges of one family: every combination of layer, run of tokens and head."""
    local, remote, heads = family[0].local, family[0].remote, family[0].heads.size
    starts, lengths = _token_runs(local, remote, tokens)
    local_at, wanted = _offsets(local, _group(local_blocks, local.group), starts, "local")
    remote_at, present = _offsets(remote, _group(remote_blocks, remote.group), starts, "remote")
    if bool((wanted & ~present).any()):
        raise LayoutError(f"{local.layer}: the producer no longer holds a block that this request needs")
    local_at, remote_at, sizes = local_at[wanted], remote_at[wanted], lengths[wanted] * local.cell_bytes
    whole = bool(np.all(sizes == local.head_stride) and np.all(sizes == remote.head_stride))
    steps, size_factor = (np.zeros(1, np.int64), heads) if whole or heads == 1 else (np.arange(heads), 1)
    local_bases = np.array([_base(piece.local, piece.heads) for piece in family])
    remote_bases = np.array([_base(piece.remote, piece.heads) for piece in family])
    shape = (len(family), len(sizes), len(steps))
    return Descriptors(
        _combine(local_bases, local_at, steps * local.head_stride),
        _combine(remote_bases, remote_at, steps * remote.head_stride),
        np.broadcast_to((sizes * size_factor)[None, :, None], shape).reshape(-1),
    )


def _base(shard: LayerShard, heads: Span) -> int:
    """Address of block 0, token 0 of the first head that moves."""
    return shard.address + (heads.start - shard.heads.start) * shard.head_stride


def _combine(bases: Ints, offsets: Ints, steps: Ints) -> Ints:
    return (bases[:, None, None] + offsets[None, :, None] + steps[None, None, :]).reshape(-1)


def _token_runs(local: LayerShard, remote: LayerShard, tokens: Span) -> tuple[Ints, Ints]:
    """Cut what both hold of ``tokens`` into runs that lie in one block on both sides: their starts and lengths.

    Where both hold the same share, a run is one of the share's tokens, whatever lies between them elsewhere.
    """
    if local.kind == "state":
        return np.array([tokens.stop - 1] if tokens else [], np.int64), np.ones(int(bool(tokens)), np.int64)
    if local.share == remote.share:
        share = local.share
        places = Span(share.before(tokens.start), share.before(_stop(local, remote, tokens)))
        starts, lengths = _cut(places, local, remote, (local.block_tokens, remote.block_tokens))
        return share.position(starts), lengths
    steps = (local.share.step(local.block_tokens), remote.share.step(remote.block_tokens))
    starts, lengths = _cut(Span(tokens.start, _stop(local, remote, tokens)), local, remote, steps)
    common = local.share.holds(starts) & remote.share.holds(starts)
    return starts[common], lengths[common]


def _stop(local: LayerShard, remote: LayerShard, tokens: Span) -> int:
    """Where to stop: with ``whole``, at the end of a block, whose last tokens may be no request's."""
    size = local.manager_block_tokens
    if not local.whole or local.opaque:
        return tokens.stop
    if remote.manager_block_tokens != size:
        raise LayoutError(f"{local.layer}: blocks of {remote.manager_block_tokens} tokens do not fill one of {size}")
    return -(-tokens.stop // size) * size


def _cut(tokens: Span, local: LayerShard, remote: LayerShard, steps: tuple[int, int]) -> tuple[Ints, Ints]:
    """Starts and lengths of ``tokens`` between multiples of either step; one by one if they lie apart in memory."""
    if local.opaque or remote.opaque:
        return _slabs(local, remote, tokens)
    if local.token_stride == local.cell_bytes and remote.token_stride == remote.cell_bytes:
        cuts = np.union1d(*(np.arange(0, tokens.stop, step) for step in steps))
        starts = np.union1d(cuts[cuts > tokens.start], [tokens.start] if tokens else [])
    else:
        starts = np.arange(tokens.start, tokens.stop)
    return starts.astype(np.int64), np.diff(starts, append=tokens.stop).astype(np.int64)


def _slabs(local: LayerShard, remote: LayerShard, tokens: Span) -> tuple[Ints, Ints]:
    """Whole blocks; a last, partly filled block moves whole, which is harmless: what lies past its tokens is unused."""
    size = local.block_tokens
    if remote.block_tokens != size:
        raise LayoutError(f"{local.layer}: opaque blocks of {size} and {remote.block_tokens} tokens cannot be paired")
    if local.share != remote.share and not (local.share.consecutive(size) and remote.share.consecutive(size)):
        raise LayoutError(f"{local.layer}: opaque blocks hold {local.share} and {remote.share}, which cannot be paired")
    if tokens.start % size:
        raise LayoutError(f"{local.layer}: cannot start at token {tokens.start} inside an opaque block of {size}")
    starts = np.arange(tokens.start, tokens.stop, size, dtype=np.int64)
    return starts, np.full(len(starts), size, dtype=np.int64)


def _group(blocks: Blocks, group: int) -> Ints:
    if group >= len(blocks):
        raise LayoutError(f"no block list for KV cache group {group}, there are {len(blocks)}")
    try:
        return np.asarray(blocks[group], dtype=np.int64)
    except OverflowError as error:
        raise LayoutError(f"block ids of KV cache group {group} are outside any cache: {error}") from error


def _offsets(shard: LayerShard, ids: Ints, starts: Ints, side: str) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Byte offset of each token of ``starts`` from the shard's first cell, and whether a block is there."""
    places = shard.share.place(starts)
    positions = places // shard.held_block_tokens
    if len(positions) and positions.max() >= len(ids):
        raise LayoutError(f"{shard.layer}: {len(ids)} {side} blocks do not hold token {int(starts.max())}")
    block = ids[positions]
    if len(block) and (block.min() < 0 or block.max() >= shard.manager_blocks):
        raise LayoutError(f"{shard.layer}: {side} block ids reach outside the cache of {shard.manager_blocks}")
    kernel_block = block * shard.split + places % shard.held_block_tokens // shard.block_tokens
    offsets = kernel_block * shard.block_stride + places % shard.block_tokens * shard.token_stride
    return offsets, block != NULL_BLOCK


def _merge(parts: list[Descriptors]) -> Descriptors:
    """One range for every run of ranges that continue each other on both sides."""
    local = np.concatenate([part.local for part in parts])
    order = np.argsort(local, kind="stable")
    local = local[order]
    remote = np.concatenate([part.remote for part in parts])[order]
    sizes = np.concatenate([part.sizes for part in parts])[order]
    if not len(sizes):
        return Descriptors(local, remote, sizes)
    continues = (local[:-1] + sizes[:-1] == local[1:]) & (remote[:-1] + sizes[:-1] == remote[1:])
    first = np.flatnonzero(np.concatenate([[True], ~continues]))
    return Descriptors(local[first], remote[first], np.add.reduceat(sizes, first))
