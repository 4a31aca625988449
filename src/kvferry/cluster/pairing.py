"""What a pair of layouts would do, without starting it: who reads what from whom, how much, in how many pieces.

Everything about reads comes from `kvferry.geometry`, as in the connector. Data parallel ranks are engine cores of their
own: a prompt moves from one core to one core, so one of each side is planned.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvferry.cluster.blueprint import Blocks, CacheShape, cache_shape, one_layer, stages, unmovable, unsplit_states
from kvferry.cluster.spec import SIZE_LIMIT, Layout, layout_reasons
from kvferry.cluster.transfers import read_transfers
from kvferry.cluster.weights import LEFT_OUT, weight_bytes
from kvferry.errors import SpecError
from kvferry.geometry import Piece, Span, check, descriptors, plan

RANGES_LIMIT = 1 << 23
"""Most (block, head) pairs of a layer that are counted one by one."""

WINDOWED = frozenset({"sliding_attention", "chunked_attention"})


class Place(msgspec.Struct, frozen=True, order=True):
    """A worker of an engine core."""

    pp: int
    tp: int

    def __str__(self) -> str:
        return f"pp{self.pp} tp{self.tp}"


class Ranges(msgspec.Struct, frozen=True):
    """Byte ranges (NIXL descriptors) that move, by how the blocks of the prompt lie in the cache.

    `contiguous`: each side's blocks follow each other, as in an empty cache; `scattered`: no two are neighbours.
    """

    contiguous: int
    scattered: int

    def __add__(self, other: "Ranges") -> "Ranges":
        return Ranges(self.contiguous + other.contiguous, self.scattered + other.scattered)

    def __mul__(self, times: int) -> "Ranges":
        return Ranges(self.contiguous * times, self.scattered * times)


class Read(msgspec.Struct, frozen=True):
    """What one decode worker reads from one prefill worker.

    Attributes:
        layers, heads: half open, ``[start, stop)``, global; no heads where nothing but states is read.
        state_bytes: of recurrent layers, whatever the length of the prompt.
        descriptors: for the whole prompt.
    """

    reader: Place
    producer: Place
    layers: Span
    heads: Span
    bytes_per_token: int
    state_bytes: int
    descriptors: Ranges

    def bytes(self, tokens: int) -> int:
        """For a prompt of ``tokens`` tokens."""
        return self.bytes_per_token * tokens + self.state_bytes


class Stage(msgspec.Struct, frozen=True):
    """One pipeline stage; its figures are of each of its tensor parallel ranks, in bytes.

    Attributes:
        state_bytes: of recurrent layers, for each request.
        kv_bytes_per_prompt: whole blocks, and the states.
    """

    pp: int
    layers: Span
    weights_bytes: int
    kv_bytes_per_token: int
    state_bytes: int
    kv_bytes_per_prompt: int


class Side(msgspec.Struct, frozen=True):
    """One instance; `cards` over all its engine cores."""

    layout: str
    tp: int
    pp: int
    dp: int
    cards: int
    stages: tuple[Stage, ...]


class Totals(msgspec.Struct, frozen=True):
    """Figures of one prompt moving between a pair.

    Attributes:
        readers: decode workers that read.
        moved_bytes: read over all of them; more than the prompt's KV bytes where decode ranks hold replicas.
        kv_bytes_per_rank: KV cache of the prompt on the fullest decode rank, whole blocks.
        weights_bytes_per_rank: estimate for the fullest decode rank.
        descriptors: over all readers.
        busiest_link_bytes: most that one worker sends or receives.
        seconds: for the busiest link at the link speed alone.
    """

    readers: int
    moved_bytes: int
    kv_bytes_per_rank: int
    weights_bytes_per_rank: int
    descriptors: Ranges
    busiest_link_bytes: int
    seconds: float


class Alternative(msgspec.Struct, frozen=True):
    """The same prefill side with another decode layout on as many cards."""

    decode: str
    totals: Totals


class Link(msgspec.Struct, frozen=True):
    """Speed at which one worker sends or receives, in 1e9 bits per second, and where the number comes from."""

    gbps: float
    source: str


class Plan(msgspec.Struct, frozen=True):
    """Everything about a pair that works; the prompt has `tokens` tokens, `state_bytes` of which depend on no number of
    them."""

    tokens: int
    block_tokens: int
    dtype: str
    link: Link
    kv_heads: int
    kv_bytes_per_token: int
    state_bytes: int
    kv_bytes_per_prompt: int
    prefill: Side
    decode: Side
    totals: Totals
    reads: tuple[Read, ...]
    alternatives: tuple[Alternative, ...]
    notes: tuple[str, ...]


class Report(msgspec.Struct, frozen=True):
    """A plan, or every reason why there is none."""

    works: bool
    reasons: tuple[str, ...]
    plan: Plan | None


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


def report(config: dict[str, Any], prefill: Layout, decode: Layout, question: Question) -> Report:
    """Plan a pair.

    Raises:
        SpecError: the configuration lacks what is needed. A pair that cannot work is no error: the report says why.
    """
    shape = cache_shape(config, question.dtype)
    if shape.heads * question.blocks > RANGES_LIMIT:
        raise SpecError(f"{question.blocks} blocks x {shape.heads} KV heads are too many to count; take fewer tokens")
    if reasons := _reasons(config, shape, prefill, decode, question):
        return Report(False, tuple(reasons), None)
    reads = tuple(_reads(shape, prefill, decode, question))
    receiving = _side(config, shape, decode, question)
    planned = Plan(
        tokens=question.tokens,
        block_tokens=question.block_tokens,
        dtype=question.dtype,
        link=question.link,
        kv_heads=shape.heads,
        kv_bytes_per_token=shape.bytes_per_token,
        state_bytes=shape.state_bytes,
        kv_bytes_per_prompt=shape.bytes_per_token * question.tokens + shape.state_bytes,
        prefill=_side(config, shape, prefill, question),
        decode=receiving,
        totals=_totals(reads, receiving, question),
        reads=reads,
        alternatives=tuple(_alternatives(config, shape, prefill, decode, question)),
        notes=tuple(_notes(config, shape)),
    )
    return Report(True, (), planned)


def measured_link(log: Path) -> Link:
    """The median speed of the loads in a transfer log (``KVFERRY_TRANSFER_LOG``), per decode worker.

    Raises:
        SpecError: there is no such log, or nothing in it was moved.
    """
    try:
        speeds = [
            transfer.bytes * 8 / transfer.ms / 1e6
            for transfer in read_transfers(log)
            if transfer.used and transfer.bytes and transfer.ms > 0
        ]
    except (msgspec.DecodeError, OSError, UnicodeError) as error:
        raise SpecError(f"{log} is not a transfer log: {error}") from error
    if not speeds:
        raise SpecError(f"{log} holds no load to measure the link speed from")
    return Link(statistics.median(speeds), f"median of {len(speeds)} loads in {log}")


def _reasons(
    config: dict[str, Any], shape: CacheShape, prefill: Layout, decode: Layout, question: Question
) -> list[str]:
    unsplit = [
        f"{side} {layout}: {reason}"
        for side, layout in (("prefill", prefill), ("decode", decode))
        for reason in (*layout_reasons(layout, config), *unsplit_states(shape, layout))
    ]
    reasons = unmovable(config) + unsplit
    if reasons:
        return reasons
    blocks = Blocks(question.block_tokens, 2 * question.blocks + 1)
    both = [[one_layer(shape, layout, blocks, kept) for layout in (prefill, decode)] for kept in (False, True)]
    return [reason for pair in both for reason in check(*pair)]


def _notes(config: dict[str, Any], shape: CacheShape) -> Iterator[str]:
    yield LEFT_OUT
    yield "seconds are bytes over link speed on the busiest worker; the cost per descriptor comes on top"
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and WINDOWED & set(map(str, kinds)):
        yield "layers with a sliding window are counted as if they kept the whole prompt"
    if shape.recurrent:
        yield (
            "a state is counted once for each request and by its own bytes; vLLM pads it to its page and keeps more of "
            "them where prefixes are cached; weights of recurrent layers are taken to be those of attention"
        )
    if config.get("index_head_dim"):
        yield "the cache of the sparse attention indexer is not counted"


class _RankRead(NamedTuple):
    """What a tensor parallel rank reads from another in any one layer: bytes of each token, or of a state."""

    reader: int
    producer: int
    heads: Span
    bytes: int
    descriptors: Ranges


NOTHING = _RankRead(0, 0, Span(0, 0), 0, Ranges(0, 0))


def _head_reads(shape: CacheShape, prefill: Layout, decode: Layout, question: Question) -> Iterator[_RankRead]:
    counted: dict[tuple[int, ...], Ranges] = {}
    for reader, producer, pieces in _pieces(shape, prefill, decode, question, recurrent=False):
        for piece in pieces:
            # Only sizes decide how many ranges there are, never where the heads lie.
            sizes = (piece.heads.size, piece.local.heads.size, piece.remote.heads.size)
            if sizes not in counted:
                counted[sizes] = _ranges([piece], question)
            yield _RankRead(reader, producer, piece.heads, piece.heads.size * shape.cell_bytes, counted[sizes])


def _state_reads(shape: CacheShape, prefill: Layout, decode: Layout, question: Question) -> Iterator[_RankRead]:
    for reader, producer, pieces in _pieces(shape, prefill, decode, question, recurrent=True):
        size = sum(piece.heads.size * piece.local.cell_bytes for piece in pieces)
        yield _RankRead(reader, producer, NOTHING.heads, size, _ranges(pieces, question))


def _pieces(
    shape: CacheShape, prefill: Layout, decode: Layout, question: Question, recurrent: bool
) -> Iterator[tuple[int, int, tuple[Piece, ...]]]:
    """Of a layer of one sort: reader, producer (tensor parallel ranks), and what moves between them."""
    blocks = Blocks(question.block_tokens, 2 * question.blocks + 1)
    producer, consumer = (one_layer(shape, layout, blocks, recurrent) for layout in (prefill, decode))
    for reader in consumer.workers:
        for index, pieces in plan(producer, reader).reads.items():
            yield reader.tp_rank, producer.workers[index].tp_rank, pieces


def _ranges(pieces: Sequence[Piece], question: Question) -> Ranges:
    contiguous = range(1, question.blocks + 1)
    scattered = range(1, 2 * question.blocks, 2)
    return Ranges(
        *(
            sum(map(len, descriptors(pieces, [ids], [ids], Span(0, question.tokens)).values()))
            for ids in (contiguous, scattered)
        )
    )


def _reads(shape: CacheShape, prefill: Layout, decode: Layout, question: Question) -> Iterator[Read]:
    """Every read: what tensor parallel ranks do in a layer, in every range of layers that two stages share."""
    heads = {(read.reader, read.producer): read for read in _head_reads(shape, prefill, decode, question)}
    states = {(read.reader, read.producer): read for read in _state_reads(shape, prefill, decode, question)}
    for reader_pp, mine in enumerate(stages(shape.layers, decode)):
        for producer_pp, theirs in enumerate(stages(shape.layers, prefill)):
            layers = mine & theirs
            caching, keeping = shape.caching(layers), shape.keeping(layers)
            for pair in sorted({*(heads if caching else ()), *(states if keeping else ())}):
                of_tokens = heads.get(pair, NOTHING) if caching else NOTHING
                of_state = states.get(pair, NOTHING)
                yield Read(
                    Place(reader_pp, pair[0]),
                    Place(producer_pp, pair[1]),
                    layers,
                    of_tokens.heads,
                    of_tokens.bytes * caching,
                    of_state.bytes * keeping,
                    of_tokens.descriptors * caching + of_state.descriptors * keeping,
                )


def _side(config: dict[str, Any], shape: CacheShape, layout: Layout, question: Question) -> Side:
    spans = stages(shape.layers, layout)
    heads = max(1, shape.heads // layout.tp)
    try:
        weights = weight_bytes(config, layout, spans, shape.dtype)
    except (TypeError, ValueError) as error:
        raise SpecError(f"config.json: a size of the model is not a number: {error}") from error

    def stage(pp: int, layers: Span, weight: int) -> Stage:
        per_token = shape.caching(layers) * heads * shape.cell_bytes
        state = shape.keeping(layers) * shape.state_bytes_per_rank(layout.tp)
        whole_blocks = per_token * question.blocks * question.block_tokens
        return Stage(pp, layers, weight, per_token, state, whole_blocks + state)

    held = tuple(stage(pp, *of) for pp, of in enumerate(zip(spans, weights, strict=True)))
    return Side(str(layout), layout.tp, layout.pp, layout.dp, layout.workers, held)


def _totals(reads: Iterable[Read], side: Side, question: Question) -> Totals:
    received: Counter[Place] = Counter()
    sent: Counter[Place] = Counter()
    ranges = Ranges(0, 0)
    for read in reads:
        received[read.reader] += read.bytes(question.tokens)
        sent[read.producer] += read.bytes(question.tokens)
        ranges += read.descriptors
    busiest = max(*received.values(), *sent.values())
    return Totals(
        readers=len(received),
        moved_bytes=received.total(),
        kv_bytes_per_rank=max(stage.kv_bytes_per_prompt for stage in side.stages),
        weights_bytes_per_rank=max(stage.weights_bytes for stage in side.stages),
        descriptors=ranges,
        busiest_link_bytes=busiest,
        seconds=busiest * 8 / question.link.gbps / 1e9,
    )


def _alternatives(
    config: dict[str, Any], shape: CacheShape, prefill: Layout, decode: Layout, question: Question
) -> Iterator[Alternative]:
    """Decode layouts one step away on as many cards: one size doubled, another halved."""
    for layout in _neighbours(decode):
        if not layout_reasons(layout, config):
            side = _side(config, shape, layout, question)
            yield Alternative(str(layout), _totals(_reads(shape, prefill, layout, question), side, question))


def _neighbours(layout: Layout) -> Iterator[Layout]:
    for halved, doubled in permutations(range(3), 2):
        sizes = [layout.tp, layout.pp, layout.dp]
        if sizes[halved] % 2 == 0 and sizes[doubled] * 2 <= SIZE_LIMIT:
            sizes[halved] //= 2
            sizes[doubled] *= 2
            tp, pp, dp = sizes
            yield Layout(tp, pp, dp)
