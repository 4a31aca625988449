"""Engines with hardly any blocks, and a secret: requests of every kind are answered as by a plain engine."""

import random
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from kvferry.cluster.dispatch import Sampling
from kvferry.cluster.metrics import PrefixHits, total

from .conftest import Fleet, Instance, Key
from .waiting import assert_nothing_is_held

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

KIND = "qwen2"
BLOCK = 128
REQUESTS, CONCURRENCY = 48, 16
LEASE_S = 30.0


@pytest.fixture
def source(request: pytest.FixtureRequest) -> random.Random:
    """Of each test's own: a prompt that another test has used may be cached."""
    return random.Random(request.node.name)


@pytest.fixture
def pair(fleet: Fleet) -> tuple[Instance, Instance]:
    """17 usable blocks of 128 tokens on either side, the prompt prefilled 256 tokens at a time."""
    producer, consumer = fleet.instances(
        Key(KIND, "pp=2", "kv_producer", variant="tight"), Key(KIND, "tp=1", "kv_consumer", variant="tight")
    )
    return producer, consumer


def _prompt(source: random.Random, tokens: int) -> list[int]:
    return [source.randint(10, 370) for _ in range(tokens)]


def _counter(instance: Instance, name: str) -> int:
    return total(httpx.get(f"{instance.url}/metrics", trust_env=False).text, name)


def test_a_queue_of_long_prompts_gets_through_engines_with_few_blocks(
    fleet: Fleet, pair: tuple[Instance, Instance], source: random.Random
) -> None:
    producer, consumer = pair
    plain = fleet.plain(KIND)
    # Just short of a whole block: the answer needs one more, for which somebody may have to make room.
    prompts = [_prompt(source, BLOCK * source.randint(1, 6) - source.randint(1, 4)) for _ in range(REQUESTS)]

    def both(prompt: list[int]) -> tuple[int, ...]:
        return fleet.dispatcher.both_legs(producer.url, consumer.url, prompt).decode.tokens

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        answers = list(pool.map(both, prompts))
    assert answers == [fleet.dispatcher.complete(plain.url, prompt).tokens for prompt in prompts]
    assert PrefixHits.read(consumer.url).external > 0
    for instance in pair:
        assert _counter(instance, "vllm:num_preemptions") > 0, f"the test is meant to make {instance.spec.name} preempt"
    assert_nothing_is_held(producer, consumer, within_s=LEASE_S + 5)


@pytest.mark.parametrize("shared", [0, BLOCK, 2 * BLOCK, 300], ids=["none", "one block", "two blocks", "whole"])
def test_what_the_consumer_has_cached_already_is_not_loaded_again(
    fleet: Fleet, pair: tuple[Instance, Instance], source: random.Random, shared: int
) -> None:
    producer, consumer = pair
    first = _prompt(source, 300)
    prompt = first[:shared] + _prompt(source, 300 - shared)
    fleet.dispatcher.complete(consumer.url, first)
    before = PrefixHits.read(consumer.url)
    legs = fleet.dispatcher.both_legs(producer.url, consumer.url, prompt)
    assert legs.decode.tokens == fleet.dispatcher.complete(fleet.plain(KIND).url, prompt).tokens
    hits = PrefixHits.read(consumer.url).since(before)
    assert hits.local == shared // BLOCK * BLOCK
    assert hits.local + hits.external >= 299
    assert_nothing_is_held(producer, consumer, within_s=LEASE_S + 5)


@pytest.mark.parametrize("shared", [0, BLOCK, 300], ids=["none", "one block", "whole"])
def test_what_the_producer_has_cached_already_is_handed_over_all_the_same(
    fleet: Fleet, pair: tuple[Instance, Instance], source: random.Random, shared: int
) -> None:
    producer, consumer = pair
    first = _prompt(source, 300)
    prompt = first[:shared] + _prompt(source, 300 - shared)
    fleet.dispatcher.complete(producer.url, first)
    before = [PrefixHits.read(instance.url) for instance in pair]
    legs = fleet.dispatcher.both_legs(producer.url, consumer.url, prompt)
    assert legs.decode.tokens == fleet.dispatcher.complete(fleet.plain(KIND).url, prompt).tokens
    at_producer, at_consumer = (PrefixHits.read(one.url).since(was) for one, was in zip(pair, before, strict=True))
    assert at_producer.local == shared // BLOCK * BLOCK
    assert at_consumer.external >= 299


def _decode(fleet: Fleet, pair: tuple[Instance, Instance], prompt: list[int], **more: Any) -> dict[str, Any]:
    producer, consumer = pair
    params = fleet.dispatcher.prefill(producer.url, prompt, uuid.uuid4().hex).kv_transfer_params
    body = {**Sampling().body("model", prompt), "kv_transfer_params": params, **more}
    answer = httpx.post(f"{consumer.url}/v1/completions", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_several_answers_to_one_prompt_share_its_prefill(
    fleet: Fleet, pair: tuple[Instance, Instance], source: random.Random
) -> None:
    prompt = _prompt(source, 300)
    # vLLM refuses n > 1 with temperature 0; of the likeliest token alone, any temperature chooses the same.
    choices = _decode(fleet, pair, prompt, n=3, temperature=1.0, top_k=1)["choices"]
    expected = fleet.dispatcher.complete(fleet.plain(KIND).url, prompt).tokens
    assert [tuple(choice["token_ids"]) for choice in choices] == [expected] * 3
    assert_nothing_is_held(*pair, within_s=LEASE_S + 5)


def test_log_probabilities_of_the_prompt_are_computed_here(
    fleet: Fleet, pair: tuple[Instance, Instance], source: random.Random
) -> None:
    """vLLM ignores every cache for them, and nobody must wait for a load that never starts."""
    prompt = _prompt(source, 300)
    [choice] = _decode(fleet, pair, prompt, prompt_logprobs=1)["choices"]
    assert tuple(choice["token_ids"]) == fleet.dispatcher.complete(fleet.plain(KIND).url, prompt).tokens
    assert len(choice["prompt_logprobs"]) == 300
    assert_nothing_is_held(*pair, within_s=LEASE_S + 5)
