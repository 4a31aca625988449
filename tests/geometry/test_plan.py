from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import LayoutError
from kvferry.geometry import EngineLayout, ReadPlan, Span, WorkerShards, check, plan

from .layouts import make_engine


@st.composite
def _stages(draw: st.DrawFn, layers: int) -> tuple[int, ...]:
    """Any partition of ``layers`` into stages, each with a layer."""
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1), max_size=4))) if layers > 1 else []
    return tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, layers], strict=True))


@st.composite
def _pairs(draw: st.DrawFn) -> tuple[EngineLayout, EngineLayout]:
    layers, heads = draw(st.integers(1, 7)), draw(st.integers(1, 9))
    sides = [make_engine(draw(st.integers(1, 9)), draw(_stages(layers)), heads) for _ in range(2)]
    return sides[0], sides[1]


def _read_heads(read_plan: ReadPlan) -> Counter[tuple[str, int]]:
    return Counter(
        (piece.local.layer, head)
        for pieces in read_plan.reads.values()
        for piece in pieces
        for head in range(*piece.heads)
    )


def _own_heads(worker: WorkerShards) -> Counter[tuple[str, int]]:
    return Counter((shard.layer, head) for shard in worker.shards for head in range(*shard.heads))


@st.composite
def _contexts(draw: st.DrawFn, heads: int) -> EngineLayout:
    """An engine of one layer with any context parallelism, inside the ranks that hold the same heads."""
    size, interleave = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 3, 4, 6, 12, 24]))
    tp = heads * size * draw(st.integers(1, 2)) if size > 1 else draw(st.integers(1, 6))
    return make_engine(tp, (1,), heads, (size, interleave), block_tokens=24)


@st.composite
def _context_pairs(draw: st.DrawFn) -> tuple[EngineLayout, EngineLayout]:
    heads = draw(st.integers(1, 3))
    return draw(_contexts(heads)), draw(_contexts(heads))


PERIOD = 24 * 4 * 3
"""Tokens after which every engine of ``_contexts`` deals them out as before."""


@given(_context_pairs())
def test_every_local_token_is_read_exactly_once(pair: tuple[EngineLayout, EngineLayout]) -> None:
    """Numbers of ranks and interleaves that do not divide each other: each (head, token) from one that holds it."""
    producer, consumer = pair
    tokens = np.arange(PERIOD)
    assert check(producer, consumer) == []
    for worker in consumer.workers:
        (local,) = worker.shards
        read = np.zeros((local.total_heads, PERIOD), np.int64)
        for index, pieces in plan(producer, worker).reads.items():
            for piece in pieces:
                assert piece.remote in producer.workers[index].shards
                common = local.share.holds(tokens) & piece.remote.share.holds(tokens)
                assert common.any(), "nothing could ever be read there"
                read[slice(*piece.heads)] += common
        own = np.zeros_like(read)
        own[slice(*local.heads)] += local.share.holds(tokens)
        assert (read == own).all()


@pytest.mark.parametrize("consumer", [1, 2, 4])
@pytest.mark.parametrize("producer", [1, 2, 4])
def test_readers_spread_over_replicas_of_a_share(producer: int, consumer: int) -> None:
    """With as many readers as holders, every holder is read by as many as any other."""
    there, here = make_engine(4, (1,), 1, (producer, 4)), make_engine(4, (1,), 1, (consumer, 4))
    sources = Counter(index for worker in here.workers for index in plan(there, worker).reads)
    assert sorted(sources) == [0, 1, 2, 3]
    assert len(set(sources.values())) == 1


def test_a_share_that_nobody_holds_is_refused() -> None:
    """A producer without one of its context parallel ranks, and one whose ranks do not agree on how to share."""
    engine = make_engine(4, (1,), 1, (4, 1))
    reader = make_engine(1, (1,), 1)
    missing = replace(engine, workers=engine.workers[1:])
    mixed = replace(engine, workers=(*engine.workers[:3], make_engine(4, (1,), 1, (4, 2)).workers[3]))
    for holed in (missing, mixed):
        assert any("do not hold all tokens" in reason for reason in check(holed, reader))
        with pytest.raises(LayoutError, match="some of the tokens"):
            plan(holed, reader.workers[0])


@given(_pairs())
def test_every_local_head_is_read_exactly_once(pair: tuple[EngineLayout, EngineLayout]) -> None:
    """For any sizes, uneven stages and replicas on both sides, each head of each local layer is covered once."""
    producer, consumer = pair
    for worker in consumer.workers:
        assert _read_heads(plan(producer, worker)) == _own_heads(worker)


@given(_pairs())
def test_pieces_join_shards_of_one_layer_that_both_hold_the_heads(pair: tuple[EngineLayout, EngineLayout]) -> None:
    """A piece names the worker it is read from, and its heads lie within both shards of the same layer."""
    producer, consumer = pair
    for worker in consumer.workers:
        for index, pieces in plan(producer, worker).reads.items():
            for piece in pieces:
                assert piece.remote in producer.workers[index].shards
                assert piece.local in worker.shards
                assert piece.remote.layer == piece.local.layer
                assert piece.heads & piece.remote.heads == piece.heads & piece.local.heads == piece.heads


@given(_pairs())
def test_no_head_range_is_cut_without_need(pair: tuple[EngineLayout, EngineLayout]) -> None:
    """A layer is read in as many pieces as there are distinct remote ranges that meet the local one."""
    producer, consumer = pair
    holders = producer.holders()
    for worker in consumer.workers:
        count = Counter(piece.local.layer for pieces in plan(producer, worker).reads.values() for piece in pieces)
        for shard in worker.shards:
            meeting = {remote.heads for _, remote in holders[shard.layer] if remote.heads & shard.heads}
            assert count[shard.layer] == len(meeting)


@given(_pairs())
def test_a_pair_that_passes_the_check_can_be_planned(pair: tuple[EngineLayout, EngineLayout]) -> None:
    """``check`` and ``plan`` agree on whole engines and on engines with a worker missing."""
    producer, consumer = pair
    holed = replace(producer, workers=producer.workers[1:])
    for engine in (producer, holed):
        for worker in consumer.workers:
            if check(engine, replace(consumer, workers=(worker,))):
                with pytest.raises(LayoutError):
                    plan(engine, worker)
            else:
                plan(engine, worker)


@pytest.mark.parametrize(("heads", "tp"), [(1, 4), (2, 4), (2, 8), (3, 9)])
def test_readers_spread_over_replicas(heads: int, tp: int) -> None:
    """With as many readers as holders, each holder is read by one reader."""
    producer, consumer = make_engine(tp, (1,), heads), make_engine(tp, (1,), heads)
    sources = Counter(index for worker in consumer.workers for index in plan(producer, worker).reads)
    assert sources == Counter(range(tp))


def test_a_missing_layer_is_named() -> None:
    """The message says which layer and which heads nobody holds."""
    with pytest.raises(LayoutError, match=r"layers\.1\..*incarnation.*\[0, 4\)"):
        plan(make_engine(2, (1,)), make_engine(1, (2,)).workers[0])


def test_missing_heads_are_named() -> None:
    """An engine without one of its workers is refused with the first heads that are missing."""
    producer = make_engine(4, (1,), heads=8)
    producer = replace(producer, workers=(producer.workers[0], *producer.workers[2:]))
    with pytest.raises(LayoutError, match=r"heads \[2, 4\)"):
        plan(producer, make_engine(1, (1,), heads=8).workers[0])


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 8)), min_size=1, max_size=6))
def test_overlapping_remote_ranges_still_cover_each_head_once(cuts: list[tuple[int, int]]) -> None:
    """A producer whose ranges overlap is read without reading a head twice, or refused where heads are missing."""
    held = [Span(start, min(8, start + size)) for start, size in cuts]
    engine = make_engine(len(held), (1,), heads=8)
    workers = [
        replace(worker, shards=(replace(worker.shards[0], heads=heads),))
        for worker, heads in zip(engine.workers, held, strict=True)
    ]
    reader = make_engine(1, (1,), heads=8).workers[0]
    if set().union(*(range(*heads) for heads in held)) == set(range(8)):
        assert _read_heads(plan(replace(engine, workers=tuple(workers)), reader)) == _own_heads(reader)
    else:
        with pytest.raises(LayoutError, match="no worker"):
            plan(replace(engine, workers=tuple(workers)), reader)


def test_nothing_to_read_makes_an_empty_plan() -> None:
    """A worker without layers, as some pipeline partitions have, reads nothing."""
    assert plan(make_engine(1, (1,)), WorkerShards(1, 0, ())).reads == {}
