"""Parameters that were used once are worth nothing afterwards, and never worth another request's text."""

import random
import uuid

import pytest

from kvferry.cluster.dispatch import Completion
from kvferry.cluster.transfers import read_transfers

from .conftest import Fleet, Instance

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

TOKENS = 300
FILLER_TOKENS = 1500
BLOCKS_BYTES_PER_TOKEN = 4096  # tiny qwen2: 4 layers, 4 heads of 32, K and V in float32


@pytest.fixture
def source() -> random.Random:
    return random.Random(20260)


def _prompt(source: random.Random, tokens: int = TOKENS) -> list[int]:
    return [source.randint(10, 370) for _ in range(tokens)]


def _reuse_all_blocks(fleet: Fleet, instance: Instance, source: random.Random) -> None:
    """Let other prompts go through an engine until none of its blocks can be what it was."""
    shards = instance.spec.layout.tp * instance.spec.layout.pp
    capacity = instance.spec.kv_cache_bytes * shards // BLOCKS_BYTES_PER_TOKEN
    for _ in range(capacity // FILLER_TOKENS + 2):
        fleet.dispatcher.complete(instance.url, _prompt(source, FILLER_TOKENS))


def _used_parameters(fleet: Fleet, producer: Instance, consumer: Instance, prompt: list[int]) -> Completion:
    legs = fleet.dispatcher.both_legs(producer.url, consumer.url, prompt)
    assert any(legs.request_id in transfer.request for transfer in read_transfers(consumer.transfer_log))
    return legs.prefill


def _replay(fleet: Fleet, consumer: Instance, prompt: list[int], used: Completion) -> tuple[Completion, int]:
    """The answer, and how many transfers it claims to have used."""
    request_id = uuid.uuid4().hex
    answer = fleet.dispatcher.decode(consumer.url, prompt, request_id, used.kv_transfer_params)
    mine = [t for t in read_transfers(consumer.transfer_log) if request_id in t.request and t.used]
    return answer, len(mine)


def test_used_parameters_give_the_right_answer_after_the_blocks_were_reused(
    fleet: Fleet, source: random.Random
) -> None:
    producer, consumer = fleet.pair("qwen2", "tp=2", "pp=2")
    prompt = _prompt(source)
    expected = fleet.dispatcher.complete(fleet.plain("qwen2").url, prompt)
    used = _used_parameters(fleet, producer, consumer, prompt)
    _reuse_all_blocks(fleet, producer, source)
    _reuse_all_blocks(fleet, consumer, source)
    answer, transfers = _replay(fleet, consumer, prompt, used)
    assert answer.tokens == expected.tokens
    assert transfers == 0


def test_used_parameters_do_not_give_their_text_to_another_prompt(fleet: Fleet, source: random.Random) -> None:
    producer, consumer = fleet.pair("qwen2", "tp=2", "pp=2")
    prompt, other = _prompt(source), _prompt(source)
    expected = fleet.dispatcher.complete(fleet.plain("qwen2").url, other)
    used = _used_parameters(fleet, producer, consumer, prompt)
    answer, transfers = _replay(fleet, consumer, other, used)
    assert answer.tokens == expected.tokens
    assert transfers == 0


def test_fresh_parameters_with_another_prompt_of_the_same_length_give_the_right_answer(
    fleet: Fleet, source: random.Random
) -> None:
    producer, consumer = fleet.pair("qwen2", "tp=2", "pp=2")
    prompt, other = _prompt(source), _prompt(source)
    expected = fleet.dispatcher.complete(fleet.plain("qwen2").url, other)
    fresh = fleet.dispatcher.prefill(producer.url, prompt, uuid.uuid4().hex)
    answer, transfers = _replay(fleet, consumer, other, fresh)
    assert answer.tokens == expected.tokens
    assert transfers == 0
