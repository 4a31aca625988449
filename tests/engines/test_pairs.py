"""Greedy tokens through prefill and decode equal those of one plain engine, in every pair of layouts."""

import itertools
import json
import zlib

import httpx
import pytest

from kvferry.cluster.doctor.software import VLLM, installed
from kvferry.cluster.prompts import default_prompts
from kvferry.cluster.verification import TIE_BOUNDS, Outcome, Verifier, reference

from .conftest import Fleet, Instance, Key

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

# In an order in which one pair's engines serve the next, and those of the last pairs the tests of the other modules.
EVERYDAY = [
    ("qwen2-6heads", "tp=3", "tp=2"),
    ("deepseek-v2", "pp=2", "tp=1"),
    ("qwen2", "tp=2,pp=2", "pp=2"),
    ("qwen2", "tp=1", "tp=2,pp=2"),
    ("qwen2", "tp=1", "pp=2"),
    ("qwen2", "pp=2", "tp=1"),
    ("qwen2", "pp=2", "pp=2"),
    ("qwen2", "pp=3,partition=1+2+1", "pp=2"),
    ("qwen2", "tp=2", "pp=2"),
    ("qwen2", "pp=2", "tp=2"),
    ("qwen2", "dp=2", "pp=2"),
    ("qwen2", "pp=2", "dp=2"),
]
SQUARE = ["tp=1", "tp=2", "pp=2", "pp=3,partition=1+2+1", "dp=2", "tp=2,pp=2"]
HEAVY = [
    *(("qwen2", *pair) for pair in itertools.product(SQUARE, repeat=2) if ("qwen2", *pair) not in EVERYDAY),
    ("deepseek-v2", "tp=2", "tp=1"),
    ("deepseek-v2", "tp=2", "pp=2"),
    ("qwen3", "pp=2", "tp=2"),
    # Two KV heads on four ranks: two of each are replicas.
    ("llama", "tp=4", "pp=2"),
    ("llama", "pp=2", "tp=4"),
    # Several KV cache groups: full attention and sliding windows.
    ("gemma3", "tp=2", "pp=2"),
    ("gemma3", "pp=2", "tp=2"),
    ("gemma3", "dp=2", "tp=2,pp=2"),
]
PAIRS = [
    *(pytest.param(*pair, id=f"{pair[0]}:{pair[1]}->{pair[2]}") for pair in EVERYDAY),
    *(pytest.param(*pair, id=f"{pair[0]}:{pair[1]}->{pair[2]}", marks=pytest.mark.heavy) for pair in HEAVY),
]


@pytest.mark.parametrize(("kind", "prefill", "decode"), PAIRS)
def test_the_tokens_are_those_of_a_plain_engine(fleet: Fleet, kind: str, prefill: str, decode: str) -> None:
    plain = fleet.plain(kind)  # asked first: a pair of many workers may need its room
    prompts = default_prompts(_vocabulary(plain), seed=zlib.crc32(f"{kind} {prefill} {decode}".encode()))
    expected = reference(fleet.dispatcher, plain.spec, prompts)
    producer, consumer = fleet.pair(kind, prefill, decode)
    verifier = Verifier(
        fleet.dispatcher, producer.spec, consumer.spec, consumer.transfer_log, TIE_BOUNDS[producer.spec.dtype]
    )
    outcomes = list(verifier.run(prompts, expected))
    _assert_good(outcomes)
    _assert_all_ranks_took_part(outcomes, producer, consumer)


def test_an_engine_is_of_the_vllm_that_is_installed(fleet: Fleet) -> None:
    """Not of another one that its processes find first."""
    [instance] = fleet.instances(Key("qwen2", "pp=2", "kv_both"))
    found = installed(VLLM)
    assert found is not None
    assert httpx.get(f"{instance.url}/version").json() == {"version": found[1]}


def _vocabulary(instance: Instance) -> int:
    return json.loads((instance.spec.model / "config.json").read_text())["vocab_size"]


def _assert_good(outcomes: list[Outcome]) -> None:
    bad = [f"{o.name} ({o.tokens} tokens): {o.verdict.value} {o.detail}" for o in outcomes if not o.verdict.good]
    assert not bad, "\n".join(bad)


def _assert_all_ranks_took_part(outcomes: list[Outcome], producer: Instance, consumer: Instance) -> None:
    transfers = [transfer for outcome in outcomes for transfer in outcome.moved.transfers]
    layout = consumer.spec.layout
    readers = {(t.consumer.dp, t.consumer.pp, t.consumer.tp) for t in transfers}
    assert readers == set(itertools.product(range(layout.dp), range(layout.pp), range(layout.tp)))
    layout = producer.spec.layout
    read_from = {(read.producer.dp, read.producer.pp) for t in transfers for read in t.reads}
    assert read_from == set(itertools.product(range(layout.dp), range(layout.pp)))
