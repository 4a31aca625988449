"""Quantised caches and unequal block sizes, as far as the CPU build runs them."""

import zlib

import pytest
import torch

from kvferry.cluster.prompts import default_prompts
from kvferry.cluster.transfers import read_transfers
from kvferry.cluster.verification import TIE_BOUNDS, Verifier, reference

from .conftest import Fleet, Instance, Key

pytestmark = [pytest.mark.engines, pytest.mark.heavy, pytest.mark.timeout(900)]

VOCABULARY = 384
PAIRS = [
    # Scales are the checkpoint's, so both sides have the same; tiny models have none, which means 1.
    ("fp8 with a scale per tensor", "qwen2", ("tp=2", "fp8"), ("tp=1", "fp8")),
    # Tokens of a latent cache lie one by one, so that a part of a block can be read.
    (
        "MLA (latent), blocks of 128 tokens to blocks of 32",
        *("deepseek-v2", ("tp=1", "bfloat16"), ("tp=1", "bfloat16-small-blocks")),
    ),
    (
        "MLA (latent), blocks of 32 tokens to blocks of 128",
        *("deepseek-v2", ("tp=1", "bfloat16-small-blocks"), ("tp=1", "bfloat16")),
    ),
]
"""What it is in docs/compatibility.md, model, and (layout, setting of ``VARIANTS``) of each side."""
NEEDS_AMX = {"deepseek-v2"}
"""Only vLLM's attention for AMX has latent caches in blocks of several sizes."""


@pytest.mark.parametrize(("what", "kind", "prefill", "decode"), PAIRS, ids=[what for what, *_ in PAIRS])
def test_the_tokens_are_those_of_a_plain_engine(
    fleet: Fleet, what: str, kind: str, prefill: tuple[str, str], decode: tuple[str, str]
) -> None:
    if kind in NEEDS_AMX and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this processor has no AMX")
    [plain] = fleet.instances(Key(kind, "tp=1", None, variant=decode[1]))
    prompts = default_prompts(VOCABULARY, seed=zlib.crc32(f"{kind} {prefill} {decode}".encode()))
    expected = reference(fleet.dispatcher, plain.spec, prompts)
    producer, consumer = fleet.instances(
        Key(kind, prefill[0], "kv_both", variant=prefill[1]), Key(kind, decode[0], "kv_both", variant=decode[1])
    )
    verifier = Verifier(
        fleet.dispatcher, producer.spec, consumer.spec, consumer.transfer_log, TIE_BOUNDS[plain.spec.dtype]
    )
    outcomes = list(verifier.run(prompts, expected))
    bad = [f"{o.name} ({o.tokens} tokens): {o.verdict.value} {o.detail}" for o in outcomes if not o.verdict.good]
    assert not bad, "\n".join(bad)


def _refused(fleet: Fleet, producer: Instance, consumer: Instance, *why: str) -> None:
    prompt = default_prompts(VOCABULARY, seed=zlib.crc32(f"{producer.spec.name}".encode()))[4].prompt
    expected = fleet.dispatcher.complete(fleet.plain("qwen2").url, prompt).tokens
    assert fleet.dispatcher.both_legs(producer.url, consumer.url, prompt).decode.tokens == expected
    assert not any(transfer.used for transfer in read_transfers(consumer.transfer_log)[-1:])
    log = consumer.managed.log.read_text()
    assert [part for part in why if part not in log] == []


def test_an_fp8_cache_is_not_read_into_a_float_one(fleet: Fleet) -> None:
    """Every difference is told, with what to do, and the prompt is computed where it is decoded."""
    producer, consumer = fleet.instances(
        Key("qwen2", "tp=2", "kv_both", variant="fp8"), Key("qwen2", "tp=1", "kv_both", variant="recompute")
    )
    _refused(
        *(fleet, producer, consumer),
        "this pair cannot work",
        "dtype differs: uint8 at the producer, float32 at the consumer; use one --kv-cache-dtype on both sides",
    )
