"""Speculative decoding: a drafter on both sides or on one. The answers are a plain engine's, only guesses get worse."""

import zlib

import httpx
import pytest

from kvferry.cluster.metrics import total
from kvferry.cluster.prompts import NamedPrompt, default_prompts
from kvferry.cluster.tiny import RECIPES
from kvferry.cluster.transfers import read_transfers
from kvferry.cluster.verification import TIE_BOUNDS, Verifier, reference

from .conftest import Fleet, Instance, Key
from .waiting import await_that

pytestmark = [pytest.mark.engines, pytest.mark.heavy, pytest.mark.timeout(900)]

VOCABULARY = 384
GUESSES = 3
DRAFTERS = [("qwen2", "drafted", 4), ("llama", "eagle", 1), ("mimo", "mtp", 1)]
"""Model, drafter (see ``VARIANTS``) and its layers."""
PROPOSED, ACCEPTED = "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"
LEFT_OUT = "kvferry:layers_left_out"


def _metric(instance: Instance, name: str) -> int:
    return total(httpx.get(f"{instance.url}/metrics", timeout=10, trust_env=False).text, name)


def _guesses(instance: Instance) -> tuple[int, int]:
    return _metric(instance, PROPOSED), _metric(instance, ACCEPTED)


def _instances(fleet: Fleet, kind: str, prefill: str, decode: str) -> tuple[Instance, Instance]:
    producer, consumer = fleet.instances(
        Key(kind, "tp=2", "kv_producer", variant=prefill), Key(kind, "tp=1", "kv_consumer", variant=decode)
    )
    return producer, consumer


def _verify(fleet: Fleet, kind: str, producer: Instance, consumer: Instance) -> list[NamedPrompt]:
    """All prompts give a plain engine's tokens, from a cache that was loaded."""
    name = f"{producer.spec.name} {consumer.spec.name}"
    prompts = default_prompts(VOCABULARY, seed=zlib.crc32(name.encode()))
    expected = reference(fleet.dispatcher, fleet.plain(kind).spec, prompts)
    verifier = Verifier(
        fleet.dispatcher, producer.spec, consumer.spec, consumer.transfer_log, TIE_BOUNDS[producer.spec.dtype]
    )
    outcomes = list(verifier.run(prompts, expected))
    bad = [f"{o.name} ({o.tokens} tokens): {o.verdict.value} {o.detail}" for o in outcomes if not o.verdict.good]
    assert not bad, "\n".join(bad)
    return prompts


def _right(consumer: Instance, before: tuple[int, int], made_up: int = 0) -> float:
    """The part of the guesses since then that was right, but for those that vLLM itself made up."""
    await_that(lambda: _guesses(consumer)[0] - before[0] > made_up, 10, "guesses are counted")
    proposed, accepted = (now - was for now, was in zip(_guesses(consumer), before, strict=True))
    print(f"{accepted} of {proposed} guesses were right, {made_up} were made up")
    return accepted / (proposed - made_up)


def _bytes_per_token(consumer: Instance) -> float:
    last = read_transfers(consumer.transfer_log)[-1]
    return last.bytes / last.tokens


@pytest.mark.parametrize(("kind", "drafter", "layers"), DRAFTERS, ids=[drafter for _, drafter, _ in DRAFTERS])
def test_a_drafter_on_the_decode_side_only_is_left_out_and_said(
    fleet: Fleet, kind: str, drafter: str, layers: int
) -> None:
    producer, consumer = _instances(fleet, kind, "", drafter)
    left, guesses = _metric(consumer, LEFT_OUT), _guesses(consumer)
    _verify(fleet, kind, producer, consumer)
    assert _right(consumer, guesses) < 0.5, "the drafter cannot have seen the prompts"
    assert _metric(consumer, LEFT_OUT) - left == layers
    assert f"{layers} layers of the drafter are not loaded from tp2pp1dp0" in consumer.managed.log.read_text()


@pytest.mark.parametrize(("kind", "drafter", "layers"), DRAFTERS, ids=[drafter for _, drafter, _ in DRAFTERS])
def test_the_layers_of_a_drafter_that_both_sides_have_move(fleet: Fleet, kind: str, drafter: str, layers: int) -> None:
    producer, consumer = _instances(fleet, kind, drafter, drafter)
    left, guesses = _metric(consumer, LEFT_OUT), _guesses(consumer)
    prompts = _verify(fleet, kind, producer, consumer)
    assert _metric(consumer, LEFT_OUT) == left
    # vLLM makes up those of the first step after a load, which computes one token of the prompt.
    loaded = sum(len(prompt.prompt) > 1 for prompt in prompts)
    right, with_drafter = _right(consumer, guesses, made_up=GUESSES * loaded), _bytes_per_token(consumer)
    [plain] = fleet.instances(Key(kind, "tp=1", None, variant=drafter))
    guesses = _guesses(plain)
    reference(fleet.dispatcher, plain.spec, prompts)
    assert right > _right(plain, guesses) - 0.1

    producer, consumer = _instances(fleet, kind, drafter, "")
    _verify(fleet, kind, producer, consumer)
    assert _metric(consumer, LEFT_OUT) == 0
    own = RECIPES[kind]["num_hidden_layers"]
    assert with_drafter / _bytes_per_token(consumer) == pytest.approx((own + layers) / own, rel=0.02)
