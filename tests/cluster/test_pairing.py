"""What is planned for a pair is what the connector's own geometry does for whole engines."""

import time
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.cluster.blueprint import Blocks, blueprint, cache_shape, published
from kvferry.cluster.layer_reads import Link, Question
from kvferry.cluster.pairing import Place, Plan, Report, measured_link, report
from kvferry.cluster.spec import Layout, kv_bytes_per_token
from kvferry.errors import SpecError
from kvferry.geometry import Span, descriptors, plan

from .configs import (
    DEEPSEEK_V3,
    FEW_HEADS,
    GATED_DELTA_NET,
    GROUPED_QUERY,
    LATENT,
    LLAMA_405B,
    MAMBA2,
    SHORT_CONVOLUTION,
)

SMALL = [Layout(tp, pp) for tp, pp in product(range(1, 5), range(1, 5))]
ASKED = Question(100, 16, "bfloat16", Link(100.0, "given"))


def _plan(config: dict[str, Any], prefill: Layout, decode: Layout, asked: Question = ASKED) -> Plan:
    answer = report(config, prefill, decode, asked)
    assert answer.plan, answer.reasons
    return answer.plan


@pytest.mark.parametrize("prefill", SMALL, ids=str)
@pytest.mark.parametrize("config", [GROUPED_QUERY, LATENT], ids=["heads", "latent"])
def test_reads_are_those_of_whole_engines(config: dict[str, Any], prefill: Layout) -> None:
    """For every pair of TP 1..4 x PP 1..4: layer by layer and head by head the same producers, and nothing twice."""
    shape, blocks = cache_shape(config, "bfloat16"), Blocks(16, 9)
    producer = blueprint(shape, prefill, blocks)
    for decode in SMALL:
        expected = Counter(
            (Place(reader.pp_rank, reader.tp_rank), Place(*divmod(index, prefill.tp)), piece.local.layer, piece.heads)
            for reader in blueprint(shape, decode, blocks).workers
            for index, pieces in plan(producer, reader).reads.items()
            for piece in pieces
        )
        planned = Counter(
            (read.reader, read.producer, f"model.layers.{layer}.self_attn.attn", read.heads)
            for read in _plan(config, prefill, decode).reads
            for layer in range(*read.layers)
        )
        assert planned == expected


@pytest.mark.parametrize("prefill", SMALL, ids=str)
@pytest.mark.parametrize("config", [GATED_DELTA_NET, MAMBA2, SHORT_CONVOLUTION], ids=["delta net", "mamba 2", "conv"])
def test_what_is_read_of_hybrids_is_what_whole_engines_read(config: dict[str, Any], prefill: Layout) -> None:
    """Bytes of tokens and of states, and descriptors, between every two ranks."""
    asked = ASKED._replace(tokens=90)
    shape, blocks = cache_shape(config, "bfloat16"), Blocks(16, 2 * asked.blocks + 1)
    producer, ids = blueprint(shape, prefill, blocks), range(1, 2 * asked.blocks, 2)
    for decode in SMALL:
        expected: dict[tuple[Place, Place], Counter[str]] = defaultdict(Counter)
        for reader in blueprint(shape, decode, blocks).workers:
            for index, pieces in plan(producer, reader).reads.items():
                found = expected[Place(reader.pp_rank, reader.tp_rank), Place(*divmod(index, prefill.tp))]
                for piece in pieces:
                    found["state" if piece.local.kind == "state" else "token"] += (
                        piece.heads.size * piece.local.cell_bytes
                    )
                ranges = descriptors(pieces, [ids], [ids], Span(0, asked.tokens))
                found["scattered"] += sum(map(len, ranges.values()))
        planned: dict[tuple[Place, Place], Counter[str]] = defaultdict(Counter)
        for read in _plan(config, prefill, decode, asked).reads:
            of = {"token": read.bytes_per_token, "state": read.state_bytes, "scattered": read.descriptors.scattered}
            planned[read.reader, read.producer].update(of)
        assert {pair: +found for pair, found in planned.items()} == expected


def test_a_state_counts_once_for_each_request() -> None:
    """Whatever the prompt's length: 3 of 5 layers, with 3 inputs of 2 x 96 + 96 channels and 24 heads of 4 x 8."""
    state = 3 * (3 * (2 * 96 + 96) + 24 * 4 * 8) * 2
    for tokens in (1, 1000):
        planned = _plan(GATED_DELTA_NET, Layout(2), Layout(1, 2), ASKED._replace(tokens=tokens))
        assert planned.state_bytes == state
        assert planned.kv_bytes_per_token == kv_bytes_per_token(GATED_DELTA_NET, "bfloat16") * 2 // 5
        assert planned.totals.moved_bytes == planned.kv_bytes_per_prompt == state + tokens * planned.kv_bytes_per_token
        assert sum(stage.state_bytes for stage in planned.decode.stages) == state
        assert [stage.state_bytes for stage in planned.prefill.stages] == [state // 2]
    assert any("a state is counted once" in note for note in planned.notes)


def test_what_a_single_group_of_mamba_has_is_on_every_rank() -> None:
    """All of B and C beside a part of the rest: 2 x 16 channels of 3 inputs in each of 3 layers."""
    one, two = (_plan(MAMBA2, Layout(tp), Layout(tp)) for tp in (1, 2))
    shared = 3 * 3 * 2 * 16 * 2
    assert two.prefill.stages[0].state_bytes == (one.prefill.stages[0].state_bytes - shared) // 2 + shared


def test_a_state_that_tensor_parallelism_cannot_deal_out_is_a_reason() -> None:
    answer = report({**GATED_DELTA_NET, "linear_num_key_heads": 9}, Layout(1), Layout(2), ASKED)
    assert answer.reasons == ("decode tp=2,pp=1,dp=1: 9 heads or channels of a state cannot be split over tp=2",)


SHARING = [
    (LATENT, "tp=4,dcp=4", "tp=4,dcp=2,pp=2"),
    (LATENT, "tp=4,dcp=2,interleave=8", "tp=6,dcp=3,pp=3"),
    (LATENT, "tp=4,dcp=4,interleave=16", "tp=4"),
    (LATENT, "tp=2,pp=2", "tp=4,dcp=4"),
    (LATENT, "tp=2,pcp=2,dcp=4,interleave=4", "tp=2,pcp=3,dcp=3"),
    (LATENT, "tp=2,pcp=2", "tp=2,pcp=2,pp=2"),
    (FEW_HEADS, "tp=8,dcp=4", "tp=4,dcp=2,interleave=2"),
    (FEW_HEADS, "tp=8,dcp=2,pp=5", "tp=2"),
    (FEW_HEADS, "tp=1", "tp=8,dcp=4,interleave=8"),
    ({**GATED_DELTA_NET, "num_key_value_heads": 2}, "tp=12,dcp=6", "tp=12,dcp=6,pp=2"),
]
"""Pairs of which context parallel ranks share out tokens on either side or both."""


@pytest.mark.parametrize(("config", "prefill", "decode"), SHARING)
@pytest.mark.parametrize("tokens", [1, 90, 480])
def test_what_context_parallel_ranks_read_is_what_whole_engines_read(
    config: dict[str, Any], prefill: str, decode: str, tokens: int
) -> None:
    """Bytes and descriptors between every two ranks, with blocks in a row and with blocks apart."""
    asked = ASKED._replace(tokens=tokens)
    shape, blocks = cache_shape(config, "bfloat16"), Blocks(16, 2 * asked.blocks + 1)
    sides = [Layout.parse(text) for text in (prefill, decode)]
    producer, consumer = (blueprint(shape, layout, blocks) for layout in sides)
    producer = published(producer, sides[0])
    expected: dict[tuple[Place, Place], tuple[int, ...]] = {}
    for reader in consumer.workers:
        for index, pieces in plan(producer, reader).reads.items():
            found = [
                list(descriptors(pieces, [ids], [ids], Span(0, tokens)).values())
                for ids in (range(1, asked.blocks + 1), range(1, 2 * asked.blocks, 2))
            ]
            other = producer.workers[index]
            pair = Place(reader.pp_rank, reader.tp_rank), Place(other.pp_rank, other.tp_rank)
            expected[pair] = (sum(one.bytes for one in found[0]), *(sum(map(len, parts)) for parts in found))
    planned = {
        (read.reader, read.producer): (read.bytes, read.descriptors.contiguous, read.descriptors.scattered)
        for read in _plan(config, *sides, asked).reads
    }
    assert planned == {pair: found for pair, found in expected.items() if found[0]}


@pytest.mark.parametrize(("config", "prefill", "decode"), SHARING)
def test_totals_are_those_of_the_reads(config: dict[str, Any], prefill: str, decode: str) -> None:
    planned = _plan(config, Layout.parse(prefill), Layout.parse(decode))
    received, sent = Counter[Place](), Counter[Place]()
    for read in planned.reads:
        received[read.reader] += read.bytes
        sent[read.producer] += read.bytes
    totals = planned.totals
    assert (totals.readers, totals.moved_bytes) == (len(received), received.total())
    assert totals.busiest_link_bytes == max(*received.values(), *sent.values())
    assert totals.descriptors.contiguous == sum(read.descriptors.contiguous for read in planned.reads)
    assert totals.descriptors.scattered == sum(read.descriptors.scattered for read in planned.reads)


def test_a_context_parallel_rank_holds_its_share_in_whole_blocks() -> None:
    """100 tokens, four ranks with blocks of 16: two blocks each."""
    whole, shared = (_plan(LATENT, Layout(), Layout(tp=8, dcp=dcp)) for dcp in (1, 4))
    per_token = whole.kv_bytes_per_token
    assert [stage.kv_bytes_per_prompt for stage in whole.decode.stages] == [7 * 16 * per_token]
    assert [stage.kv_bytes_per_prompt for stage in shared.decode.stages] == [2 * 16 * per_token]
    assert [stage.kv_bytes_per_token for stage in shared.decode.stages] == [per_token // 4]
    assert shared.totals.moved_bytes == 2 * shared.kv_bytes_per_prompt
    assert whole.totals.moved_bytes == 8 * whole.kv_bytes_per_prompt


def test_ranks_of_prefill_context_parallelism_are_cards_that_each_keep_all() -> None:
    planned = _plan(LATENT, Layout(tp=2, pcp=2), Layout(tp=2, pcp=2))
    assert (planned.decode.cards, planned.totals.readers) == (4, 4)
    assert planned.totals.moved_bytes == 4 * planned.kv_bytes_per_prompt
    assert {read.producer.tp for read in planned.reads} == {2, 3}
    assert any("prefill context parallelism" in note for note in planned.notes)


@pytest.mark.parametrize(("prefill", "decode"), [("tp=4,dcp=4", "tp=4,dcp=2"), ("tp=4,dcp=4", "tp=1")])
def test_what_an_interleave_of_a_block_would_save_is_what_it_saves(prefill: str, decode: str) -> None:
    """A range for each token and layer, and one for each block and layer."""
    asked = ASKED._replace(tokens=480)
    sides = [Layout.parse(text) for text in (prefill, decode)]
    by_token = _plan(LATENT, *sides, asked)
    by_block = _plan(LATENT, *(replace(side, interleave=16) for side in sides), asked)
    assert by_token.totals.descriptors.scattered == by_token.decode.tp // by_token.decode.dcp * 480 * 5
    assert by_token.block_interleave == by_block.totals.descriptors
    assert by_block.totals.descriptors.scattered * 16 == by_token.totals.descriptors.scattered
    assert by_block.block_interleave is None


def test_between_equal_shares_an_interleave_saves_nothing() -> None:
    equal, none = (_plan(LATENT, Layout(tp=4, dcp=dcp), Layout(tp=4, pp=5, dcp=dcp)) for dcp in (4, 1))
    assert equal.block_interleave is none.block_interleave is None
    assert equal.totals.descriptors.contiguous == none.totals.descriptors.contiguous


def test_an_interleave_that_does_not_divide_the_block_is_a_reason() -> None:
    answer = report(LATENT, Layout(tp=2, dcp=2, interleave=5), Layout(interleave=5), ASKED)
    assert answer.reasons == (
        "prefill tp=2,pp=1,dp=1,dcp=2,interleave=5: interleave=5 does not divide blocks of 16 tokens",
    )


def test_unequal_contexts_beside_states_are_a_reason() -> None:
    """As for the connector: blocks that are loaded to their end have one size over all ranks."""
    config = {**GATED_DELTA_NET, "num_key_value_heads": 2}
    (reason,) = report(config, Layout(tp=12, dcp=6), Layout(tp=4, dcp=2), ASKED).reasons
    assert "blocks of 16 x 6 ranks (1 at a time) and 16 x 2 ranks (1 at a time) tokens cannot be paired" in reason
    planned = _plan(config, Layout(tp=4, dcp=2), Layout(tp=4, dcp=2))
    assert "tp=4,pp=1,dp=1" not in {other.decode for other in planned.alternatives}


def test_context_parallelism_is_among_the_alternatives() -> None:
    planned = _plan(LATENT, Layout(), Layout(tp=4, dcp=2))
    others = {other.decode: other.totals for other in planned.alternatives}
    assert others["tp=4,pp=1,dp=1,dcp=4"].kv_bytes_per_rank < planned.totals.kv_bytes_per_rank
    assert others["tp=4,pp=1,dp=1"].moved_bytes == 2 * planned.totals.moved_bytes
    assert "tp=2,pp=2,dp=1,dcp=2" in others


@pytest.mark.parametrize("prefill", SMALL, ids=str)
def test_every_head_of_every_layer_is_read_once(prefill: Layout) -> None:
    for decode in SMALL:
        cells = Counter(
            (layer, head)
            for read in _plan(GROUPED_QUERY, prefill, decode).reads
            for layer in range(*read.layers)
            for head in range(*read.heads)
        )
        assert set(cells.values()) == {1}
        assert len(cells) == 5 * 12


@pytest.mark.parametrize("config", [GROUPED_QUERY, LATENT, FEW_HEADS], ids=["heads", "latent", "replicas"])
@pytest.mark.parametrize(("prefill", "decode"), [("tp=1", "tp=8,pp=2"), ("tp=4,pp=3", "tp=8"), ("pp=5", "tp=2")])
def test_bytes_of_every_replica_set_are_those_of_the_prompt(config: dict[str, Any], prefill: str, decode: str) -> None:
    """Ranks that hold the same heads are replicas; one of each, together, read every byte of the prompt once."""
    if config is GROUPED_QUERY:
        config = {**config, "num_key_value_heads": 8}
    planned = _plan(config, Layout.parse(prefill), Layout.parse(decode))
    replicas = max(1, planned.decode.tp // planned.kv_heads)
    sets: dict[int, int] = defaultdict(int)
    for read in planned.reads:
        sets[read.reader.tp % replicas] += read.bytes_per_token * ASKED.tokens
    whole = kv_bytes_per_token(config, "bfloat16") * ASKED.tokens
    assert dict(sets) == dict.fromkeys(range(replicas), whole)
    assert planned.totals.moved_bytes == whole * replicas
    assert planned.kv_bytes_per_prompt == whole


@pytest.mark.parametrize(("prefill", "decode"), [("tp=2", "tp=3,pp=2"), ("tp=4,pp=4", "tp=4"), ("pp=2", "tp=2,pp=5")])
@pytest.mark.parametrize("tokens", [1, 16, 90, 96])
def test_descriptors_are_those_of_whole_engines(prefill: str, decode: str, tokens: int) -> None:
    asked = ASKED._replace(tokens=tokens)
    planned = _plan(GROUPED_QUERY, Layout.parse(prefill), Layout.parse(decode), asked)
    shape, blocks = cache_shape(GROUPED_QUERY, "bfloat16"), Blocks(16, 2 * asked.blocks + 1)
    producer, consumer = (blueprint(shape, Layout.parse(text), blocks) for text in (prefill, decode))

    def count(ids: range) -> int:
        return sum(
            len(ranges)
            for reader in consumer.workers
            for pieces in plan(producer, reader).reads.values()
            for ranges in descriptors(pieces, [ids], [ids], Span(0, tokens)).values()
        )

    assert planned.totals.descriptors.contiguous == count(range(1, asked.blocks + 1))
    assert planned.totals.descriptors.scattered == count(range(1, 2 * asked.blocks, 2))


def test_a_rank_holds_whole_blocks_of_its_layers_and_heads() -> None:
    planned = _plan(GROUPED_QUERY, Layout(), Layout(tp=4, pp=2))
    per_token = [stage.kv_bytes_per_token for stage in planned.decode.stages]
    assert sum(per_token) * 4 == planned.kv_bytes_per_token
    assert [stage.kv_bytes_per_prompt for stage in planned.decode.stages] == [each * 112 for each in per_token]


def test_time_is_that_of_the_busiest_link() -> None:
    """One prefill rank that sends everything is slower than two decode ranks that receive half each."""
    planned = _plan(GROUPED_QUERY, Layout(), Layout(tp=2))
    assert planned.totals.busiest_link_bytes == planned.kv_bytes_per_prompt
    assert planned.totals.seconds == pytest.approx(planned.kv_bytes_per_prompt * 8 / 100e9)


def test_data_parallel_ranks_are_planned_once() -> None:
    one, many = (_plan(GROUPED_QUERY, Layout(dp=dp), Layout(tp=2, dp=dp)) for dp in (1, 256))
    assert one.reads == many.reads
    assert one.totals == many.totals
    assert many.decode.cards == 512


def test_every_reason_of_both_sides_is_given() -> None:
    config = {**LLAMA_405B, "layer_types": ["linear_attention"]}
    answer = report(config, Layout(tp=48, pp=160), Layout(tp=3), ASKED)
    assert answer == Report(
        False,
        (
            "config.json does not say in known terms what linear_attention layers keep of a request",
            "prefill tp=48,pp=160,dp=1: 128 attention heads cannot be split over tp=48",
            "prefill tp=48,pp=160,dp=1: 126 layers are too few for pp=160",
            "decode tp=3,pp=1,dp=1: 128 attention heads cannot be split over tp=3",
            "decode tp=3,pp=1,dp=1: 8 KV heads cannot be split over, or repeated on, tp=3",
        ),
        None,
    )


def test_alternatives_use_as_many_cards_and_fit_the_model() -> None:
    """Fewer ranks that share the one head of a latent cache read fewer bytes."""
    planned = _plan(DEEPSEEK_V3, Layout(tp=8), Layout(tp=8, dp=2))
    cards = {other.decode: Layout.parse(other.decode).workers for other in planned.alternatives}
    assert set(cards.values()) == {16}
    moved = {other.decode: other.totals.moved_bytes for other in planned.alternatives}
    assert moved["tp=4,pp=1,dp=4"] * 2 == planned.totals.moved_bytes


def test_the_largest_layouts_are_planned() -> None:
    largest = Layout(tp=64, pp=16, dp=256)
    planned = _plan(LLAMA_405B, largest, largest, ASKED._replace(tokens=6000))
    assert planned.totals.readers == 1024
    assert planned.decode.cards == 1024 * 256


def test_the_largest_contexts_are_planned_in_less_than_a_second() -> None:
    """Every rank reads from every one: 64 ranks that take a block at a time, and 64 that take a token."""
    prefill, decode = (Layout(tp=64, pp=16, dp=256, dcp=64, interleave=interleave) for interleave in (16, 1))
    started = time.process_time()
    planned = _plan(DEEPSEEK_V3, prefill, decode, ASKED._replace(tokens=6000))
    assert time.process_time() - started < 1
    assert planned.totals.readers == 1024


def test_what_the_estimate_leaves_out_is_said() -> None:
    plain = _plan(GROUPED_QUERY, Layout(), Layout()).notes
    assert "estimate" in plain[0]
    windowed = _plan({**GROUPED_QUERY, "layer_types": ["sliding_attention"]}, Layout(), Layout()).notes
    assert "sliding window" in windowed[-1]
    shared = {**FEW_HEADS, "layer_types": ["sliding_attention"]}
    assert any("--disable-hybrid" in note for note in _plan(shared, Layout(), Layout(tp=4, dcp=2)).notes)


def test_more_ranges_than_can_be_counted_are_refused() -> None:
    with pytest.raises(SpecError, match="take fewer tokens"):
        report(LLAMA_405B, Layout(), Layout(), ASKED._replace(tokens=10_000_000, block_tokens=1))


def test_the_link_speed_is_measured_from_a_transfer_log(tmp_path: Path) -> None:
    """The median of loads that were used; a load that failed says nothing about the link."""
    log = tmp_path / "transfers.jsonl"
    place = {"dp": 0, "pp": 0, "tp": 0}
    lines = [
        {"request": "a", "consumer": place, "reads": [{"producer": place, "bytes": size}], "ms": 1.0, "result": result}
        for size, result in ((125_000, "held"), (250_000, "held"), (375_000, "held"), (9_000_000, "gone"))
    ]
    log.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    assert measured_link(log).gbps == pytest.approx(2.0)


@pytest.mark.parametrize(("content", "said"), [("", "holds no load"), ("no json\n", "is not a transfer log")])
def test_a_log_without_loads_is_refused(tmp_path: Path, content: str, said: str) -> None:
    log = tmp_path / "transfers.jsonl"
    log.write_text(content)
    with pytest.raises(SpecError, match=said):
        measured_link(log)
