"""A child of vLLM's MultiConnector beside its OffloadingConnector, or beside its ExampleConnector, which keeps files:
either order, and either child may load."""

import json
import random
import zlib

import httpx
import pytest

from kvferry.cluster.metrics import total
from kvferry.cluster.prompts import default_prompts
from kvferry.cluster.transfers import read_transfers
from kvferry.cluster.verification import TIE_BOUNDS, Verifier, reference

from .conftest import Fleet, Instance, Key
from .waiting import assert_nothing_is_held, await_that

pytestmark = [pytest.mark.engines, pytest.mark.heavy, pytest.mark.timeout(900)]

KIND = "qwen2"
BLOCK = 128
ORDERS = ["ferry-first", "offloading-first"]
ORDERS_WITH_FILES = ["ferry-before-files", "files-before-ferry"]
LOADED_BY_OFFLOADING, LOADED_BY_US = "vllm:kv_offload_load_bytes", "vllm:nixl_bytes_transferred_sum"


def _pair(fleet: Fleet, order: str) -> tuple[Instance, Instance]:
    """Two ranks on one side: what both children say has to be gathered from both."""
    producer, consumer = fleet.instances(
        Key(KIND, "tp=2", "kv_both", variant=order), Key(KIND, "tp=1", "kv_both", variant=order)
    )
    return producer, consumer


def _metric(instance: Instance, name: str) -> int:
    return total(httpx.get(f"{instance.url}/metrics", timeout=10, trust_env=False).text, name)


@pytest.mark.parametrize("order", ORDERS)
def test_the_tokens_are_those_of_a_plain_engine(fleet: Fleet, order: str) -> None:
    plain = fleet.plain(KIND)
    vocabulary = json.loads((plain.spec.model / "config.json").read_text())["vocab_size"]
    prompts = default_prompts(vocabulary, seed=zlib.crc32(order.encode()))
    expected = reference(fleet.dispatcher, plain.spec, prompts)
    producer, consumer = _pair(fleet, order)
    before = _metric(consumer, LOADED_BY_US)
    verifier = Verifier(
        fleet.dispatcher, producer.spec, consumer.spec, consumer.transfer_log, TIE_BOUNDS[producer.spec.dtype]
    )
    outcomes = list(verifier.run(prompts, expected))
    bad = [f"{o.name} ({o.tokens} tokens): {o.verdict.value} {o.detail}" for o in outcomes if not o.verdict.good]
    assert not bad, "\n".join(bad)
    assert_nothing_is_held(producer, consumer, within_s=30)
    # The parent takes the statistics of both, and exports each child's under its own names.
    await_that(lambda: _metric(consumer, LOADED_BY_US) > before, 10, "what was loaded is counted")
    await_that(lambda: _metric(producer, "vllm:kv_offload_store_bytes") > 0, 10, "what was offloaded is counted")


@pytest.mark.parametrize("order", ORDERS)
def test_what_both_children_have_is_loaded_by_the_first(fleet: Fleet, order: str) -> None:
    source = random.Random(f"{order} both")
    prompt = [source.randint(10, 370) for _ in range(5 * BLOCK + 60)]
    expected = fleet.dispatcher.complete(fleet.plain(KIND).url, prompt).tokens
    producer, consumer = _pair(fleet, order)
    assert fleet.dispatcher.complete(consumer.url, prompt).tokens == expected
    answer = httpx.post(f"{consumer.url}/reset_prefix_cache", timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    moved, by_them = len(read_transfers(consumer.transfer_log)), _metric(consumer, LOADED_BY_OFFLOADING)
    assert fleet.dispatcher.both_legs(producer.url, consumer.url, prompt).decode.tokens == expected
    # Also when the other child has loaded: the grant was given back, long before its lease would have ended.
    assert_nothing_is_held(producer, consumer, within_s=30)
    if order == "ferry-first":
        assert [t.used for t in read_transfers(consumer.transfer_log)[moved:]] == [True]
        assert _metric(consumer, LOADED_BY_OFFLOADING) == by_them
    else:
        assert read_transfers(consumer.transfer_log)[moved:] == []
        await_that(lambda: _metric(consumer, LOADED_BY_OFFLOADING) > by_them, 10, "the other child's load is counted")


@pytest.mark.parametrize("order", ORDERS_WITH_FILES)
def test_beside_a_child_that_keeps_files_either_may_load(fleet: Fleet, order: str) -> None:
    """It knows of one rank and one KV cache group, and loads in the step that computes the rest."""
    source = random.Random(order)
    prompts = [[source.randint(10, 370) for _ in range(size)] for size in (5, 2 * BLOCK + 60, 5 * BLOCK + 60)]
    plain = fleet.plain(KIND)
    expected = [fleet.dispatcher.complete(plain.url, prompt).tokens for prompt in prompts]
    producer, consumer = fleet.instances(*(Key(KIND, "tp=1", "kv_both", copy, order) for copy in (0, 1)))
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert fleet.dispatcher.both_legs(producer.url, consumer.url, prompt).decode.tokens == tokens
    assert [transfer.used for transfer in read_transfers(consumer.transfer_log)] == [True] * len(prompts)
    # By now decode has files of these prompts, too.
    answer = httpx.post(f"{consumer.url}/reset_prefix_cache", timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    assert _loads_of_files(consumer) == 0
    assert fleet.dispatcher.both_legs(producer.url, consumer.url, prompts[-1]).decode.tokens == expected[-1]
    assert_nothing_is_held(producer, consumer, within_s=30)
    loaded_by_us = len(read_transfers(consumer.transfer_log)) - len(prompts)
    assert (loaded_by_us, _loads_of_files(consumer)) == ((1, 0) if order == "ferry-before-files" else (0, 1))


def _loads_of_files(instance: Instance) -> int:
    return instance.managed.log.read_text().count("Inject KV cache of")
