"""Each kind, byte by byte, between layouts that differ in everything."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
from vllm.model_executor.layers.mamba import mamba_utils

from .caches import Kind, Side
from .kinds import CONTEXT, KINDS, sliding
from .pairs import transfer

TOKENS = 75
PP = (1, 2)
Pair = tuple[tuple[int, int], tuple[int, int]]
"""(TP, PP) of producer and consumer."""


def pairs(kind: Kind) -> list[Pair]:
    """(TP, PP) of both sides: every pair of TP sizes, with a PP of its own on each side."""
    return [
        ((producer, PP[number % 2]), (consumer, PP[(number // 2 + 1) % 2]))
        for number, (producer, consumer) in enumerate(itertools.product(_sizes(kind), repeat=2))
    ]


def _sizes(kind: Kind) -> tuple[int, ...]:
    """Those that vLLM's specs can be cut into."""
    return tuple(tp for tp in kind.tp if kind.heads % tp == 0 or tp % kind.heads == 0)


STAGED_KINDS = (
    "Full attention, grouped query",
    "Full attention and sliding windows in KV cache groups",
    "fp8 with a scale per token and head",
    "nvfp4, K and V apart",
    "Blocks of 16 tokens to blocks of 48",
    "HND to NHD",
    "BLHNC to LBHNC",
    "LBHNC to BHLNC",
    "Mamba 2, one group",
    "MLA, DCP 4 tokens at a time to DCP 6 at a time, blocks of 16 to blocks of 24",
    "MLA, PCP and DCP over its ranks to DCP",
)
"""Kinds that are moved with host staging too: each sort of layer, block and layout that the copying tells apart."""

EVERYDAY = 2
"""Pairs of each kind: the first TP size on both sides, and the first to the next."""

CASES = [
    pytest.param(
        *(kind, *pair),
        id="{}:tp{}pp{}->tp{}pp{}".format(kind.name, *pair[0], *pair[1]),
        marks=[pytest.mark.heavy] if number >= EVERYDAY else [],
    )
    for kind in KINDS
    for number, pair in enumerate(pairs(kind))
]


@pytest.mark.parametrize(("kind", "producer", "consumer"), CASES)
def test_every_byte_is_right_and_no_other_is_touched(
    kind: Kind, producer: tuple[int, int], consumer: tuple[int, int]
) -> None:
    transfer(Side(kind, True, *producer, TOKENS), Side(kind, False, *consumer, TOKENS, num_blocks=30))


STAGED = [
    pytest.param(
        *(kind, sides),
        id=f"{kind.name}:{name}",
        marks=[pytest.mark.heavy] if kind.name != STAGED_KINDS[0] and not all(sides) else [],
    )
    for kind in KINDS
    if kind.name in STAGED_KINDS
    for name, sides in {"both sides": (True, True), "prefill": (True, False), "decode": (False, True)}.items()
]


@pytest.mark.parametrize(("kind", "sides"), STAGED)
def test_by_way_of_host_memory_every_byte_is_right_and_no_other_is_touched(
    kind: Kind, sides: tuple[bool, bool]
) -> None:
    """Between both sides, also with a prefix that is there, whose copy is of another time."""
    producer, consumer = (
        Side(kind, number == 0, *layout, 4 * TOKENS, num_blocks=60 + number, staged=sides[number])
        for number, layout in enumerate(pairs(kind)[1])
    )
    transfer(producer, replace(consumer, cached=48 * consumer.dcp if all(sides) else 0))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.projections], ids=lambda kind: kind.name)
def test_a_convolution_stored_channel_by_channel_is_cut_as_well(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM can store a convolution's state either way (VLLM_SSM_CONV_STATE_LAYOUT)."""
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: "DS")
    sizes = _sizes(kind)
    transfer(Side(kind, True, sizes[1], 2, TOKENS), Side(kind, False, sizes[-1], 1, TOKENS, num_blocks=30))


@pytest.mark.parametrize("kind", CONTEXT, ids=lambda kind: kind.name)
def test_of_a_prefix_that_is_there_nothing_is_read(kind: Kind) -> None:
    """A hit in the consumer's prefix cache is of whole blocks as its scheduler counts them."""
    consumer = Side(kind, False, max(kind.tp), 1, 4 * TOKENS, num_blocks=30)
    hit = 2 * consumer.block_tokens * consumer.dcp
    transfer(Side(kind, True, max(kind.tp), 1, 4 * TOKENS), replace(consumer, cached=hit))


def test_windows_are_not_shared_out_by_vllm() -> None:
    """It asks every layer of an engine that starts how much memory a request takes."""
    sizes = {"decode_context_parallel_size": 2, "prefill_context_parallel_size": 1}
    with pytest.raises(AssertionError, match="DCP not support sliding window"):
        sliding(24)(1, 16, 0).max_memory_usage_bytes(SimpleNamespace(parallel_config=SimpleNamespace(**sizes)))
