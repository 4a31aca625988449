"""Host staging on real engines: the tokens are those of a plain engine, whichever side copies."""

import json
import random
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from kvferry.cluster.metrics import total
from kvferry.cluster.prompts import default_prompts
from kvferry.cluster.transfers import read_transfers
from kvferry.cluster.verification import TIE_BOUNDS, Verifier, reference

from .conftest import Fleet, Instance, Key
from .test_states import TIE
from .test_streaming import BLOCK, CONCURRENCY, LEASE_S, REQUESTS, Pair
from .waiting import assert_nothing_is_held, await_that

pytestmark = [pytest.mark.engines, pytest.mark.heavy, pytest.mark.timeout(900)]

KIND = "qwen2"
STAGED, PLAIN = "staged", ""
PAIRS = [
    (KIND, "tp=2", "pp=2", STAGED, STAGED, TIE_BOUNDS["float32"]),
    (KIND, "tp=2", "pp=2", STAGED, PLAIN, TIE_BOUNDS["float32"]),
    (KIND, "tp=2", "pp=2", PLAIN, STAGED, TIE_BOUNDS["float32"]),
    ("gemma3", "pp=2", "tp=2", STAGED, STAGED, TIE_BOUNDS["float32"]),
    ("lfm2", "tp=2", "tp=1", STAGED, STAGED, TIE),
]
"""Kind, layouts of prefill and decode, which of them stage, and how near two tokens may be to count as one."""


def _log(instance: Instance) -> str:
    return instance.managed.log.read_text()


def _staged_loads(instance: Instance) -> int:
    text = httpx.get(f"{instance.url}/metrics", timeout=10, trust_env=False).text
    lines = [line for line in text.splitlines() if line.startswith("kvferry:phase_seconds_count") and '"stage"' in line]
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines)


@pytest.mark.parametrize(
    ("kind", "prefill", "decode", "here", "there", "tie"),
    PAIRS,
    ids=[f"{pair[0]}:{pair[1]} {pair[3]}->{pair[2]} {pair[4]}" for pair in PAIRS],
)
def test_the_tokens_are_those_of_a_plain_engine(
    fleet: Fleet, kind: str, prefill: str, decode: str, here: str, there: str, tie: float
) -> None:
    plain = fleet.plain(kind)
    vocabulary = json.loads((plain.spec.model / "config.json").read_text())["vocab_size"]
    prompts = default_prompts(vocabulary, seed=zlib.crc32(f"{kind} {here} {there}".encode()))
    expected = reference(fleet.dispatcher, plain.spec, prompts)
    producer, consumer = fleet.instances(
        Key(kind, prefill, "kv_both", variant=here), Key(kind, decode, "kv_both", variant=there)
    )
    for instance, variant in ((producer, here), (consumer, there)):
        assert ("moves by way of host memory" in _log(instance)) is (variant == STAGED)
    outcomes = Verifier(fleet.dispatcher, producer.spec, consumer.spec, consumer.transfer_log, tie).run(
        prompts, expected
    )
    bad = [f"{o.name} ({o.tokens} tokens): {o.verdict.value} {o.detail}" for o in outcomes if not o.verdict.good]
    assert not bad, "\n".join(bad)
    if there == STAGED:
        await_that(lambda: _staged_loads(consumer) > 0, 10, "what was copied to the device is counted")
    else:
        assert _staged_loads(consumer) == 0


@pytest.fixture
def source(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(request.node.name)


def _prompt(source: random.Random, tokens: int) -> list[int]:
    return [source.randint(10, 370) for _ in range(tokens)]


@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_a_prefix_that_is_cached_is_handed_over_and_its_blocks_are_left_alone(
    fleet: Fleet, source: random.Random, where: str
) -> None:
    """At prefill it was computed for a request that nobody reads; at decode others go on using it."""
    first = _prompt(source, 3 * BLOCK + 20)
    prompt = first[: 3 * BLOCK] + _prompt(source, 200)
    plain = [fleet.dispatcher.complete(fleet.plain(KIND).url, some).tokens for some in (first, prompt)]
    producer, consumer = fleet.instances(
        Key(KIND, "tp=2", "kv_both", variant=STAGED), Key(KIND, "pp=2", "kv_both", variant=STAGED)
    )
    cached = producer if where == "prefill" else consumer
    assert fleet.dispatcher.complete(cached.url, first).tokens == plain[0]
    earlier, hits = len(read_transfers(consumer.transfer_log)), _hits(cached)
    assert fleet.dispatcher.both_legs(producer.url, consumer.url, prompt).decode.tokens == plain[1]
    assert _hits(cached) - hits >= 3 * BLOCK, "it was cached"
    moved = read_transfers(consumer.transfer_log)[earlier:]
    loaded = len(prompt) - (0 if where == "prefill" else 3 * BLOCK)
    assert {(transfer.used, transfer.tokens) for transfer in moved} == {(True, loaded)}
    assert fleet.dispatcher.complete(cached.url, first).tokens == plain[0]


def _hits(instance: Instance) -> int:
    text = httpx.get(f"{instance.url}/metrics", timeout=10, trust_env=False).text
    return total(text, "vllm:prefix_cache_hits")


@pytest.fixture
def pair(fleet: Fleet) -> Iterator[Pair]:
    fleet.plain(KIND)
    producer, consumer = fleet.instances(
        Key(KIND, "pp=2", "kv_both", variant="staged-tight"), Key(KIND, "tp=1", "kv_both", variant="staged-tight")
    )
    yield Pair(fleet, producer, consumer)
    assert_nothing_is_held(producer, consumer, within_s=LEASE_S / 3)


def test_a_prompt_that_streams_is_copied_as_it_is_computed(pair: Pair, source: random.Random) -> None:
    pair.assert_followed(_prompt(source, 7 * 256 + 100))
    await_that(lambda: _staged_loads(pair.consumer) > 0, 10, "what was copied to the device is counted")


def test_prompts_stream_between_engines_with_few_blocks(pair: Pair, source: random.Random) -> None:
    """Blocks change hands all the time, also those of a prefill that is preempted."""
    prompts = [_prompt(source, BLOCK * source.randint(1, 6) - source.randint(1, 4)) for _ in range(REQUESTS)]
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        answers = [answer.tokens for answer in pool.map(pair.at_once, prompts)]
    assert answers == [pair.plain(prompt) for prompt in prompts]
    assert any(transfer.used for transfer in read_transfers(pair.consumer.transfer_log))
