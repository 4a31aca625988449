"""What a pair of layouts would do, without starting it: who reads what from whom, how much, in how many pieces.

Everything about reads comes from `kvferry.geometry`, as in the connector. Data parallel ranks are engine cores of their
own: a prompt moves from one core to one core, so one of each side is planned.
"""

import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import msgspec

from kvferry.cluster.blueprint import (
    Blocks,
    CacheShape,
    cache_shape,
    one_layer,
    published,
    stages,
    unmovable,
    unsplit_states,
)
from kvferry.cluster.layer_reads import (
    NOTHING,
    Link,
    Moved,
    Question,
    head_reads,
    layer_reads,
    total_ranges,
)
from kvferry.cluster.ranges import Ranges
from kvferry.cluster.spec import FLAGS, SIZE_LIMIT, Layout, layout_reasons
from kvferry.cluster.transfers import read_transfers
from kvferry.cluster.weights import LEFT_OUT, weight_bytes
from kvferry.errors import SpecError
from kvferry.geometry import Span, check

RANGES_LIMIT = 1 << 23
"""Most (block, head) pairs of a layer that are counted one by one."""

WINDOWED = frozenset({"sliding_attention", "chunked_attention"})


class Place(msgspec.Struct, frozen=True, order=True):
    """A worker of an engine core; ranks of prefill context parallelism count on after the tensor parallel ones."""

    pp: int
    tp: int

    def __str__(self) -> str:
        return f"pp{self.pp} tp{self.tp}"


class Read(msgspec.Struct, frozen=True):
    """What one decode worker reads from one prefill worker.

    Attributes:
        layers, heads: half open, ``[start, stop)``, global; no heads where nothing but states is read.
        bytes_per_token: of each token that is read.
        tokens: how many of the prompt that are: those that both hold, where context parallel ranks share them out.
        state_bytes: of recurrent layers, whatever the length of the prompt.
        descriptors: for the whole prompt.
    """

    reader: Place
    producer: Place
    layers: Span
    heads: Span
    bytes_per_token: int
    tokens: int
    state_bytes: int
    descriptors: Ranges

    @property
    def bytes(self) -> int:
        """For the whole prompt."""
        return self.bytes_per_token * self.tokens + self.state_bytes


class Stage(msgspec.Struct, frozen=True):
    """One pipeline stage; its figures are of each of its ranks, in bytes.

    Attributes:
        kv_bytes_per_token: on average over the tokens of a prompt, rounded up: ranks may share them out.
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
    """One instance; `cards` over all its engine cores, `interleave` in tokens (see ``Layout``)."""

    layout: str
    tp: int
    pp: int
    dp: int
    pcp: int
    dcp: int
    interleave: int
    cards: int
    stages: tuple[Stage, ...]

    @property
    def ranks(self) -> int:
        """Workers of a stage."""
        return self.tp * self.pcp


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


class Plan(msgspec.Struct, frozen=True):
    """Everything about a pair that works; the prompt has `tokens` tokens, `state_bytes` of which depend on no number of
    them.

    Attributes:
        block_interleave: what `totals.descriptors` would be if context parallel ranks took a block of tokens at a time;
            None where that changes nothing.
    """

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
    block_interleave: Ranges | None
    reads: tuple[Read, ...]
    alternatives: tuple[Alternative, ...]
    notes: tuple[str, ...]


class Report(msgspec.Struct, frozen=True):
    """A plan, or every reason why there is none."""

    works: bool
    reasons: tuple[str, ...]
    plan: Plan | None


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
    moved = layer_reads(shape, prefill, decode, question)
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
        totals=_totals(shape, prefill, decode, moved, receiving, question),
        block_interleave=_block_interleave(shape, prefill, decode, question, moved),
        reads=tuple(_reads(shape, prefill, decode, moved)),
        alternatives=tuple(_alternatives(config, shape, prefill, decode, question)),
        notes=tuple(_notes(config, shape, prefill, decode)),
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
        for reason in (
            *layout_reasons(layout, config),
            *unsplit_states(shape, layout),
            *_interleave_reasons(layout, question),
        )
    ]
    reasons = unmovable(config) + unsplit
    if reasons:
        return reasons
    blocks = Blocks(question.block_tokens, 2 * question.blocks + 1)
    shape = replace(shape, whole=bool(shape.recurrent))
    both = [[one_layer(shape, layout, blocks, kept) for layout in (prefill, decode)] for kept in (False, True)]
    return [reason for producer, consumer in both for reason in check(published(producer, prefill), consumer)]


def _interleave_reasons(layout: Layout, question: Question) -> Iterator[str]:
    if layout.dcp > 1 and question.block_tokens % layout.interleave:
        yield f"interleave={layout.interleave} does not divide blocks of {question.block_tokens} tokens"


def _notes(config: dict[str, Any], shape: CacheShape, prefill: Layout, decode: Layout) -> Iterator[str]:
    yield LEFT_OUT
    yield "seconds are bytes over link speed on the busiest worker; the cost per descriptor comes on top"
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and WINDOWED & set(map(str, kinds)):
        yield "layers with a sliding window are counted as if they kept the whole prompt"
        if max(prefill.dcp, decode.dcp) > 1:
            yield "vLLM shares out layers with a sliding window only with --disable-hybrid-kv-cache-manager"
    if shape.recurrent:
        yield (
            "a state is counted once for each request and by its own bytes; vLLM pads it to its page and keeps more of "
            "them where prefixes are cached; what a prompt leaves of its last block is read, too, and not counted; "
            "weights of recurrent layers are taken to be those of attention"
        )
    if max(prefill.pcp, decode.pcp) > 1:
        yield (
            "ranks of prefill context parallelism count on after the tensor parallel ones; without dcp each keeps all, "
            "and prompts are read from the last"
        )
    if config.get("index_head_dim"):
        yield "the cache of the sparse attention indexer is not counted"


def _reads(shape: CacheShape, prefill: Layout, decode: Layout, moved: Moved) -> Iterator[Read]:
    """Every read: what ranks do in a layer, in every range of layers that two stages share."""
    heads = {(read.reader, read.producer): read for read in moved.of_tokens}
    states = {(read.reader, read.producer): read for read in moved.of_states}
    for reader_pp, mine in enumerate(stages(shape.layers, decode)):
        for producer_pp, theirs in enumerate(stages(shape.layers, prefill)):
            layers = mine & theirs
            caching, keeping = shape.caching(layers), shape.keeping(layers)
            for pair in sorted({*(heads if caching else ()), *(states if keeping else ())}):
                of_tokens = heads.get(pair, NOTHING) if caching else NOTHING
                of_state = states.get(pair, NOTHING) if keeping else NOTHING
                yield Read(
                    Place(reader_pp, pair[0]),
                    Place(producer_pp, pair[1]),
                    layers,
                    of_tokens.heads,
                    of_tokens.bytes * caching,
                    of_tokens.tokens,
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
        held = shape.caching(layers) * heads * shape.cell_bytes
        state = shape.keeping(layers) * shape.state_bytes_per_rank(layout.tp)
        blocks = -(-question.tokens // (question.block_tokens * layout.dcp))
        whole_blocks = held * blocks * question.block_tokens
        return Stage(pp, layers, weight, -(-held // layout.dcp), state, whole_blocks + state)

    each = tuple(stage(pp, *of) for pp, of in enumerate(zip(spans, weights, strict=True)))
    sizes = {key: getattr(layout, key) for key in FLAGS}
    return Side(layout=str(layout), cards=layout.workers, stages=each, **sizes)


def _totals(shape: CacheShape, prefill: Layout, decode: Layout, moved: Moved, side: Side, question: Question) -> Totals:
    received = list(_stage_bytes(shape, decode, moved, "reader"))
    busiest = max(*received, *_stage_bytes(shape, prefill, moved, "producer"))
    return Totals(
        readers=len(received),
        moved_bytes=sum(received),
        kv_bytes_per_rank=max(stage.kv_bytes_per_prompt for stage in side.stages),
        weights_bytes_per_rank=max(stage.weights_bytes for stage in side.stages),
        descriptors=total_ranges(shape, moved),
        busiest_link_bytes=busiest,
        seconds=busiest * 8 / question.link.gbps / 1e9,
    )


def _stage_bytes(shape: CacheShape, layout: Layout, moved: Moved, end: str) -> Iterator[int]:
    """Bytes of a prompt at each worker of one side that has any."""
    of_layer: list[Counter[int]] = []
    for reads in moved:
        of_layer.append(Counter())
        for read in reads:
            of_layer[-1][getattr(read, end)] += read.bytes * read.tokens
    tokens, states = of_layer
    for layers in stages(shape.layers, layout):
        caching, keeping = shape.caching(layers), shape.keeping(layers)
        sums = (tokens[rank] * caching + states[rank] * keeping for rank in tokens.keys() | states.keys())
        yield from filter(None, sums)


def _block_interleave(
    shape: CacheShape, prefill: Layout, decode: Layout, question: Question, moved: Moved
) -> Ranges | None:
    """Descriptors if context parallel ranks took a block of tokens at a time, where those are fewer."""
    if (prefill.dcp, prefill.interleave) == (decode.dcp, decode.interleave):
        return None
    block = question.block_tokens
    by_block = head_reads(shape, replace(prefill, interleave=block), replace(decode, interleave=block), question)
    changed = total_ranges(shape, moved._replace(of_tokens=tuple(by_block)))
    return changed if changed.scattered < total_ranges(shape, moved).scattered else None


def _alternatives(
    config: dict[str, Any], shape: CacheShape, prefill: Layout, decode: Layout, question: Question
) -> Iterator[Alternative]:
    """Decode layouts one step away on as many cards: one size doubled, another halved; or the context's alone."""
    for layout in _neighbours(decode):
        if not _reasons(config, shape, prefill, layout, question):
            side = _side(config, shape, layout, question)
            moved = layer_reads(shape, prefill, layout, question)
            yield Alternative(str(layout), _totals(shape, prefill, layout, moved, side, question))


def _neighbours(layout: Layout) -> Iterator[Layout]:
    sizes = {key: getattr(layout, key) for key in ("tp", "pp", "dp", "dcp")}
    halves = {key: size // 2 for key, size in sizes.items() if size % 2 == 0}
    doubles = {key: size * 2 for key, size in sizes.items() if size * 2 <= SIZE_LIMIT}
    for halved, doubled in permutations(("tp", "pp", "dp"), 2):
        if halved in halves and doubled in doubles:
            changes = {halved: halves[halved], doubled: doubles[doubled]}
            yield replace(layout, partition=None, **changes)
    # Context parallel ranks are tensor parallel ones already.
    for changed in (halves, doubles):
        if "dcp" in changed:
            yield replace(layout, dcp=changed["dcp"])
