"""What is planned for a pair is what the connector's own geometry does for whole engines."""

from collections import Counter, defaultdict
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.cluster.blueprint import Blocks, blueprint, cache_shape
from kvferry.cluster.pairing import Link, Place, Plan, Question, Report, measured_link, report
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


def test_what_the_estimate_leaves_out_is_said() -> None:
    plain = _plan(GROUPED_QUERY, Layout(), Layout()).notes
    assert "estimate" in plain[0]
    windowed = _plan({**GROUPED_QUERY, "layer_types": ["sliding_attention"]}, Layout(), Layout()).notes
    assert "sliding window" in windowed[-1]


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
