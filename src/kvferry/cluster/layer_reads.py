"""What the ranks of two stages read from each other in any one layer; the layers and stages are all alike."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from kvferry.cluster.blueprint import Blocks, CacheShape, one_layer, published
from kvferry.cluster.ranges import NO_RANGES, Ranges, Shared, ranges_of, shared
from kvferry.cluster.spec import Layout
from kvferry.geometry import Piece, Span, plan


class Link(msgspec.Struct, frozen=True):
    """Speed at which one worker sends or receives, in 1e9 bits per second, and where the number comes from."""

    gbps: float
    source: str


class Question(NamedTuple):
    """What is asked besides the pair: prompt and block length in tokens, element type, link."""

    tokens: int
    block_tokens: int
    dtype: str
    link: Link

    @property
    def blocks(self) -> int:
        """Blocks that the prompt takes, the last one perhaps partly."""
        return -(-self.tokens // self.block_tokens)


class RankRead(NamedTuple):
    """What a rank reads from another in any one layer: of so many tokens these bytes each, or of one state."""

    reader: int
    producer: int
    heads: Span
    bytes: int
    tokens: int
    descriptors: Ranges


NOTHING = RankRead(0, 0, Span(0, 0), 0, 0, NO_RANGES)


class Moved(NamedTuple):
    """In a layer that caches tokens, and in one that keeps a state."""

    of_tokens: tuple[RankRead, ...]
    of_states: tuple[RankRead, ...]


def layer_reads(shape: CacheShape, prefill: Layout, decode: Layout, question: Question) -> Moved:
    """What one prompt moves, in a layer of each sort that the model has."""
    heads = head_reads(shape, prefill, decode, question)
    states = _state_reads(shape, prefill, decode, question) if shape.recurrent else ()
    return Moved(tuple(heads), tuple(states))


def head_reads(shape: CacheShape, prefill: Layout, decode: Layout, question: Question) -> Iterator[RankRead]:
    """Of a layer that caches tokens; one read for each two ranks and run of heads."""
    # Only sizes decide how many ranges there are, never where the heads lie.
    whole: dict[tuple[int, ...], Ranges] = {}
    parts: Shared | None = None
    for reader, producer, pieces in _pieces(shape, prefill, decode, question, recurrent=False):
        for piece in pieces:
            mine, theirs = piece.local, piece.remote
            sizes = (piece.heads.size, mine.heads.size, theirs.heads.size)
            read = RankRead(reader, producer, piece.heads, sizes[0] * shape.cell_bytes, question.tokens, NO_RANGES)
            if mine.share.size == theirs.share.size == 1:
                if sizes not in whole:
                    whole[sizes] = ranges_of([piece], question.tokens)
                yield read._replace(descriptors=whole[sizes])
                continue
            parts = parts or shared(mine, theirs, question.tokens)
            tokens, *ranges = (int(of[mine.share.rank, theirs.share.rank]) for of in parts)
            # A prompt may be too short for two ranks that meet later.
            if tokens:
                yield read._replace(tokens=tokens, descriptors=Ranges(*ranges))


def _state_reads(shape: CacheShape, prefill: Layout, decode: Layout, question: Question) -> Iterator[RankRead]:
    for reader, producer, pieces in _pieces(shape, prefill, decode, question, recurrent=True):
        size = sum(piece.heads.size * piece.local.cell_bytes for piece in pieces)
        yield RankRead(reader, producer, NOTHING.heads, size, 1, ranges_of(pieces, question.tokens))


def _pieces(
    shape: CacheShape, prefill: Layout, decode: Layout, question: Question, recurrent: bool
) -> Iterator[tuple[int, int, tuple[Piece, ...]]]:
    """Of a layer of one sort: reader, producer (ranks), and what moves between them."""
    blocks = Blocks(question.block_tokens, 2 * question.blocks + 1)
    producer = published(one_layer(shape, prefill, blocks, recurrent), prefill)
    for reader in one_layer(shape, decode, blocks, recurrent).workers:
        for index, pieces in plan(producer, reader).reads.items():
            yield reader.tp_rank, producer.workers[index].tp_rank, pieces


def total_ranges(shape: CacheShape, moved: Moved) -> Ranges:
    """Of all layers and ranks."""
    layers = Span(0, shape.layers)
    tokens, states = (sum((read.descriptors for read in reads), NO_RANGES) for reads in moved)
    return tokens * shape.caching(layers) + states * shape.keeping(layers)
