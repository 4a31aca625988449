"""Models with recurrent states through prefill and decode: a state arrives as it was after the very last token."""

import json
import zlib

import pytest

from kvferry.cluster.prompts import default_prompts
from kvferry.cluster.verification import Verifier, reference

from .conftest import Fleet, Key

pytestmark = [pytest.mark.engines, pytest.mark.heavy, pytest.mark.timeout(900)]

TIE = 2.5
"""In log probability. The first token after a load is computed by vLLM's kernel for one token, a plain engine's by
the one for many, and on these tiny models, whose candidates lie tens apart, the two differ: one plain engine gave the
same token in the same context -38.9 one way and -41.2 the other. What a wrong state gives is tens apart."""

PAIRS = [
    ("lfm2", "tp=1", "pp=2", ""),
    ("lfm2", "tp=2", "pp=2", ""),
    ("qwen3-next", "tp=2", "pp=2", "bfloat16"),
    ("qwen3-next", "pp=2", "tp=2", "bfloat16"),
    # vLLM 0.32 cannot load this model in a pipeline.
    ("granite4", "tp=2", "tp=1", "uncached"),
    ("granite4", "dp=2", "tp=2", "uncached"),
]


@pytest.mark.parametrize(
    ("kind", "prefill", "decode", "variant"), PAIRS, ids=["{}:{}->{}".format(*pair) for pair in PAIRS]
)
def test_a_state_goes_on_where_the_prefill_left_it(
    fleet: Fleet, kind: str, prefill: str, decode: str, variant: str
) -> None:
    [plain] = fleet.instances(Key(kind, "tp=1", None, variant=variant))
    vocabulary = json.loads((plain.spec.model / "config.json").read_text())["vocab_size"]
    prompts = default_prompts(vocabulary, seed=zlib.crc32(f"{kind} {prefill} {decode}".encode()))
    expected = reference(fleet.dispatcher, plain.spec, prompts)
    producer, consumer = fleet.instances(
        Key(kind, prefill, "kv_producer", variant=variant), Key(kind, decode, "kv_consumer", variant=variant)
    )
    outcomes = Verifier(fleet.dispatcher, producer.spec, consumer.spec, consumer.transfer_log, TIE).run(
        prompts, expected
    )
    bad = [f"{o.name} ({o.tokens} tokens): {o.verdict.value} {o.detail}" for o in outcomes if not o.verdict.good]
    assert not bad, "\n".join(bad)
