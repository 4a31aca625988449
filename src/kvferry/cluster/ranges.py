"""How many byte ranges (NIXL descriptors) move between two ranks, as `kvferry.geometry` makes them."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from kvferry.geometry import LayerShard, Piece, Span, descriptors
from kvferry.geometry.span import Ints


class Ranges(msgspec.Struct, frozen=True):
    """Byte ranges that move, by how the blocks of the prompt lie in the cache.

    `contiguous`: each side's blocks follow each other, as in an empty cache; `scattered`: no two are neighbours.
    """

    contiguous: int
    scattered: int

    def __add__(self, other: "Ranges") -> "Ranges":
        return Ranges(self.contiguous + other.contiguous, self.scattered + other.scattered)

    def __mul__(self, times: int) -> "Ranges":
        return Ranges(self.contiguous * times, self.scattered * times)


NO_RANGES = Ranges(0, 0)


def ranges_of(pieces: Sequence[Piece], tokens: int) -> Ranges:
    """What one rank reads of a prompt from another one that holds all of its tokens."""
    blocks = -(-tokens // pieces[0].local.block_tokens)
    orders = range(1, blocks + 1), range(1, 2 * blocks, 2)
    prompt = Span(0, tokens)
    return Ranges(*(sum(map(len, descriptors(pieces, [ids], [ids], prompt).values())) for ids in orders))


class Shared(NamedTuple):
    """By rank of the one and of the other context, shape (size, size): tokens that both hold, and their ranges."""

    tokens: Ints
    contiguous: Ints
    scattered: Ints


def shared(local: LayerShard, remote: LayerShard, tokens: int) -> Shared:
    """Of one head of a prompt, between every rank that shares out tokens as ``local`` does and as ``remote`` does.

    The same as ``descriptors`` for each two of them, which is too slow for two times 64 ranks. A rank that shares out
    tokens holds one head; where only one side does, ranges end with the other's blocks, however many heads it holds.
    """
    sides = (local, remote)
    steps = (side.share.step(side.block_tokens) for side in sides)
    starts = np.union1d(*(np.arange(0, tokens, step) for step in steps)).astype(np.int64)
    pair = local.share.owner(starts) * remote.share.size + remote.share.owner(starts)
    order = np.argsort(pair, kind="stable")
    pair, lengths = pair[order], np.diff(starts, append=tokens)[order]
    goes_on, within = pair[1:] == pair[:-1], np.ones(len(pair) - 1, np.bool_)
    for side in sides:
        places = side.share.place(starts[order])
        goes_on &= places[1:] == places[:-1] + lengths[:-1]
        within &= places[1:] % side.block_tokens != 0
    shape = (local.share.size, remote.share.size)

    def counted(which: Ints, weights: Ints | None = None) -> Ints:
        return np.bincount(which, weights, local.share.size * remote.share.size).astype(np.int64).reshape(shape)

    runs = counted(pair)
    return Shared(counted(pair, lengths), runs - counted(pair[1:][goes_on]), runs - counted(pair[1:][goes_on & within]))
