from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvferry.geometry import EngineLayout, Span, check, compatibility, left_out, plan

from .layouts import FINGERPRINT, make_engine, with_shards


def _assert_only_reason(reasons: list[str], *words: str) -> None:
    assert len(reasons) == 1, reasons
    assert all(word in reasons[0] for word in words), reasons


def _with_one_shard(engine: EngineLayout, worker: int, **changes: Any) -> EngineLayout:
    """``engine`` with fields changed in the first shard of one worker."""
    changed = engine.workers[worker]
    changed = replace(changed, shards=(replace(changed.shards[0], **changes), *changed.shards[1:]))
    return replace(engine, workers=(*engine.workers[:worker], changed, *engine.workers[worker + 1 :]))


def test_any_two_layouts_of_one_model_work() -> None:
    """Sizes that do not divide, uneven stages and replicas are no reason to refuse."""
    engines = [make_engine(tp, stages, 6) for tp in (1, 2, 3, 4, 8) for stages in ((5,), (1, 4), (2, 2, 1))]
    assert not [reason for one in engines for other in engines for reason in check(one, other)]
    assert len({compatibility(engine) for engine in engines}) == 1


def test_unequal_blocks_work_where_tokens_are_separable() -> None:
    """Block sizes, block counts and kernel block splits may differ between the sides."""
    one = make_engine(2, (2,), block_tokens=16, num_blocks=8)
    other = make_engine(1, (2,), block_tokens=24, num_blocks=30, split=2)
    assert check(one, other) == check(other, one) == []
    assert compatibility(one) == compatibility(other)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "other"}, ("model", "tiny-qwen2", "other")),
        ({"protocol": 2}, ("protocol version", "1", "2")),
        ({"software": "0.33"}, ("vLLM version", "0.32", "0.33")),
    ],
)
def test_engines_of_different_kind_are_refused(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    """A different model, protocol or vLLM is named with both values."""
    other = replace(make_engine(1, (1,)), fingerprint=replace(FINGERPRINT, **changes))
    _assert_only_reason(check(make_engine(1, (1,)), other), *words)
    assert compatibility(make_engine(1, (1,))) != compatibility(other)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "latent"}, ("kind", "attention", "latent")),
        ({"total_heads": 6}, ("total_heads", "4", "6")),
        ({"cell_bytes": 16}, ("cell_bytes", "32", "16")),
        ({"dtype": "bfloat16"}, ("dtype", "float32", "bfloat16")),
        ({"packing": "amx"}, ("packing", "plain", "amx")),
        ({"opaque": True}, ("opaque", "False", "True")),
    ],
)
def test_shards_of_different_make_are_refused(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    """What a cell is and how it is packed must be the same; the reason names the layer and both values."""
    one = make_engine(1, (1,))
    other = with_shards(one, **changes)
    _assert_only_reason(check(one, other), "model.layers.0", *words)
    assert compatibility(one) != compatibility(other)


@pytest.mark.parametrize("changes", [{"block_tokens": 8}, {"split": 2}, {"block_tokens": 8, "split": 2}], ids=str)
def test_unequal_blocks_are_refused_where_tokens_are_not_separable(changes: dict[str, Any]) -> None:
    """Opaque slabs of different size cannot be paired, nor can blocks that are split differently."""
    one, other = make_engine(1, (1,), opaque=True), make_engine(1, (1,), opaque=True, **changes)
    _assert_only_reason(check(one, other), "--block-size", "plain")
    assert compatibility(one) != compatibility(other)


CONTEXTS = [(1, 1), (2, 1), (2, 16), (4, 4), (4, 16)]
"""Context parallel ranks, and tokens that each takes at a time."""


def test_context_parallelism_may_differ_where_tokens_are_separable() -> None:
    """Number of ranks, interleave and block size."""
    engines = [make_engine(4, (2,), 1, context, block_tokens=size) for context in CONTEXTS for size in (16, 48)]
    assert not [reason for one in engines for other in engines for reason in check(one, other)]
    assert len({compatibility(engine) for engine in engines}) == 1


def test_opaque_blocks_pair_where_they_hold_the_same_tokens() -> None:
    """Shared out alike, or a block at a time, when each block holds a run of tokens as it does without sharing."""
    engines = {context: make_engine(4, (1,), 1, context, opaque=True) for context in CONTEXTS}
    runs = {context for context in CONTEXTS if context == (1, 1) or context[1] == 16}
    for one, producer in engines.items():
        for other, consumer in engines.items():
            if one == other or {one, other} <= runs:
                assert check(producer, consumer) == []
                assert compatibility(producer) == compatibility(consumer)
            else:
                words = ("--decode-context-parallel-size", "--cp-kv-cache-interleave-size", "separably")
                _assert_only_reason(check(producer, consumer), *words)
                assert compatibility(producer) != compatibility(consumer)


def test_blocks_that_are_loaded_to_their_end_are_counted_over_all_ranks() -> None:
    """2 ranks with 16 tokens each fill one block of 32, and do not fill one of 16."""
    two = make_engine(2, (1,), 1, (2, 4), whole=True)
    assert check(two, make_engine(1, (1,), 1, whole=True, block_tokens=32)) == []
    reasons = check(two, make_engine(1, (1,), 1, whole=True))
    _assert_only_reason(reasons, "16 x 2 ranks (4 at a time) and 16 tokens", "one product of --block-size and")


def test_missing_layer_is_refused() -> None:
    """A layer that only the consumer has cannot be loaded; one that only the producer has is not asked for."""
    short, long = make_engine(2, (1, 1)), make_engine(2, (1, 2))
    _assert_only_reason(check(short, long), "model.layers.2", "does not hold this layer")
    assert check(long, short) == []


def test_missing_heads_are_refused() -> None:
    """When the worker with some heads is absent, the reason says which heads."""
    engine = make_engine(4, (1,), heads=8)
    holed = replace(engine, workers=(*engine.workers[:1], *engine.workers[2:]))
    _assert_only_reason(check(holed, make_engine(1, (1,), heads=8)), "[2, 4)")
    assert check(holed, replace(engine, workers=engine.workers[2:])) == []


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("changes", [{"cell_bytes": 16}, {"packing": "amx"}, {"dtype": "bfloat16"}], ids=str)
def test_one_worker_of_another_make_is_enough_to_refuse(worker: int, changes: dict[str, Any]) -> None:
    """Tensor parallel ranks on machines of two kinds: each holder of a layer is compared, not only the first."""
    odd, even = _with_one_shard(make_engine(2, (1,)), worker, **changes), make_engine(2, (1,))
    assert check(odd, even)
    assert check(even, odd)


@pytest.mark.parametrize("worker", [0, 1])
def test_one_worker_with_other_opaque_blocks_is_enough_to_refuse(worker: int) -> None:
    """The block size of each holder counts too."""
    even = make_engine(2, (1,), opaque=True)
    _assert_only_reason(check(_with_one_shard(even, worker, block_tokens=8), even), "--block-size")


def test_all_reasons_are_given_at_once_and_each_once() -> None:
    """Who fixes a pair sees everything that is wrong with it, without repetition per rank."""
    one = make_engine(2, (2,))
    other = with_shards(make_engine(2, (3,)), dtype="bfloat16", packing="amx")
    other = replace(other, fingerprint=replace(FINGERPRINT, model="other"))
    reasons = check(one, other)
    assert len(reasons) == 1 + 2 * 2 + 1
    assert len(set(reasons)) == len(reasons)


def test_a_worker_can_check_for_itself() -> None:
    """Only the layers that the given consumer workers hold are looked at."""
    producer, consumer = make_engine(1, (2, 2)), make_engine(2, (3, 2))
    first_stage = replace(consumer, workers=consumer.workers[:2])
    assert check(producer, first_stage) == []
    assert check(producer, consumer) != []


def test_ranges_that_overlap_without_being_equal_cover() -> None:
    """Coverage is about heads, not about how the producer cut them."""
    engine = make_engine(3, (1,))
    for worker, heads in enumerate([Span(0, 3), Span(1, 2), Span(2, 4)]):
        engine = _with_one_shard(engine, worker, heads=heads)
    assert check(engine, make_engine(1, (1,))) == []
    assert check(_with_one_shard(engine, 2, heads=Span(3, 4)), make_engine(1, (1,))) == []


def _drafted(tp: int, stages: tuple[int, ...]) -> EngineLayout:
    """An engine whose last layer is a drafter's."""
    engine = make_engine(tp, stages)
    last = f"model.layers.{sum(stages) - 1}.self_attn.attn"
    workers = [
        replace(worker, shards=tuple(replace(shard, draft=shard.layer == last) for shard in worker.shards))
        for worker in engine.workers
    ]
    return replace(engine, workers=tuple(workers))


@pytest.mark.parametrize("producer", [make_engine(2, (1, 1)), make_engine(1, (2,))], ids=lambda engine: engine.label)
def test_layers_of_a_drafter_that_only_the_consumer_has_are_left_out(producer: EngineLayout) -> None:
    """They only make guesses worse. The model's own layers move as ever."""
    consumer = _drafted(2, (1, 2))
    assert check(producer, consumer) == []
    assert left_out(producer, consumer) == ["model.layers.2.self_attn.attn"]
    assert compatibility(producer) == compatibility(consumer)
    for worker in consumer.workers:
        moved = {piece.local.layer for pieces in plan(producer, worker).reads.values() for piece in pieces}
        assert moved == {shard.layer for shard in worker.shards if not shard.draft}


def test_layers_of_a_drafter_that_both_have_move_and_those_of_the_producer_alone_are_not_asked_for() -> None:
    drafted, plain = _drafted(2, (1, 2)), make_engine(1, (2,))
    assert (check(drafted, drafted), left_out(drafted, drafted)) == ([], [])
    moved = plan(drafted, _drafted(1, (3,)).workers[0]).reads
    assert {piece.local.layer[13] for pieces in moved.values() for piece in pieces} == {"0", "1", "2"}
    assert (check(drafted, plain), left_out(drafted, plain)) == ([], [])


def test_blocks_that_are_loaded_to_their_end_must_be_of_one_size() -> None:
    """Where new blocks may hold what is no number, also when tokens are separable."""
    one, other = make_engine(1, (1,), whole=True), make_engine(1, (1,), whole=True, block_tokens=8)
    _assert_only_reason(check(one, other), "--block-size", "16 and 8")
    assert compatibility(one) != compatibility(other)


def test_a_states_blocks_may_be_of_any_size() -> None:
    state = {"kind": "state", "token_stride": 0, "head_stride": 32}
    one, other = make_engine(1, (1,), **state), make_engine(1, (1,), **state, block_tokens=4096)
    assert check(one, other) == check(other, one) == []


@pytest.mark.parametrize("changes", [{"kind": "latent"}, {"cell_bytes": 16}, {"dtype": "uint8"}, {"packing": "amx"}])
def test_a_reason_says_what_to_do(changes: dict[str, Any]) -> None:
    one = make_engine(1, (1,))
    assert all("; use " in reason for reason in check(one, with_shards(one, **changes)))
