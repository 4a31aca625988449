"""The kinds of cache that are moved here, by what their layers' specs are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Recurrent
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from .caches import Kind, MakeSpec

HEADS = 12
HND, NHD = KVCacheLayout.LBHNC, KVCacheLayout.LBNHC
PACKED = (KVCacheLayout.BLHNC, KVCacheLayout.BLNHC, KVCacheLayout.BHLNC, KVCacheLayout.LHBNC)


REPLICATED = {"max_tp_shards": 1} if "max_tp_shards" in MLAAttentionSpec.__dataclass_fields__ else {}
"""What a spec of a cache that every rank has says of that, from vLLM 0.31 on."""


def full(heads: int = HEADS, **more: Any) -> MakeSpec:
    shape = {"head_size": 16, "dtype": torch.bfloat16, **more}
    return lambda tp, size, _: FullAttentionSpec(block_size=size, num_kv_heads=max(1, heads // tp), **shape)


def sliding(window: int, heads: int = HEADS) -> MakeSpec:
    def make(tp: int, size: int, _: int) -> SlidingWindowSpec:
        shape = {"num_kv_heads": max(1, heads // tp), "head_size": 16, "dtype": torch.bfloat16}
        return SlidingWindowSpec(block_size=size, sliding_window=window, **shape)

    return make


def latent(**more: Any) -> MakeSpec:
    shape = {"num_kv_heads": 1, "head_size": 96, "dtype": torch.bfloat16, **REPLICATED, **more}
    return lambda tp, size, _: MLAAttentionSpec(block_size=size, **shape)


def scaled(mode: KVQuantMode, dtype: torch.dtype) -> MakeSpec:
    """One float32 scale behind the K, and one behind the V, of each (token, head): as the Triton backend asks for."""
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    make = full(dtype=dtype, kv_quant_mode=mode)
    return lambda tp, size, guesses: TritonAttentionBackend.customize_spec(make(tp, size, guesses))


def nvfp4() -> MakeSpec:
    """As FlashInfer asks for: packed K of all heads, then V of all heads, with scales inside each."""
    from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim

    content = nvfp4_kv_cache_full_dim(32)
    make = full(head_size=32, dtype=torch.uint8, kv_quant_mode=KVQuantMode.NVFP4)

    def customized(tp: int, size: int, guesses: int) -> FullAttentionSpec:
        spec = make(tp, size, guesses)
        return replace(spec, num_head_slots=2 * spec.num_kv_heads, state_content_bytes=content)

    return customized


FLOATS = (torch.bfloat16, torch.float32)
BESIDE = full(head_size=64)
"""The attention beside a recurrent state."""


def recurrent(
    kind: Recurrent, shapes: Any, dtypes: tuple[torch.dtype, ...] = FLOATS, beside: MakeSpec = BESIDE
) -> MakeSpec:
    """A state, in a page as large as one of the attention beside it; ``shapes`` of (tensor parallel size, guesses)."""

    def make(tp: int, size: int, guesses: int) -> MambaSpec:
        return MambaSpec(
            size,
            shapes=shapes(tp, guesses),
            dtypes=dtypes,
            mamba_type=kind,
            page_size_padded=beside(tp, size, guesses).page_size_bytes,
            num_speculative_blocks=guesses,
        )

    return make


def _hybrid(
    name: str, make: MakeSpec, projections: tuple[tuple[int, bool], ...], tp: tuple[int, ...] = (1, 2, 4)
) -> Kind:
    return Kind(name, ((2, BESIDE), (3, make)), projections=projections, tp=tp)


def _shared_hybrid(name: str, heads: int, dcp: tuple[int, int], **more: Any) -> Kind:
    """Context parallel ranks share out the tokens of the attention, and each keeps the states of its heads whole.

    A block has as many tokens over all ranks on both sides: what a prompt leaves of its last one is loaded too.
    """
    blocks = tuple(64 // size for size in dcp)
    if heads == 1:
        beside, backend = latent(head_size=576), "FLASHMLA"
        projections = ((128, False), (128, False), (64, False))
        shapes, state = lambda tp, _: Shapes.gated_delta_net_state_shape(tp, 8, 8, 16, 8, 4), Recurrent.GDN_ATTN
    else:
        beside, backend = full(heads=heads, head_size=128), "FLASH_ATTN"
        projections = ((128, False), (16, True), (16, True))
        shapes, state = lambda tp, _: Shapes.mamba2_state_shape(tp, 128, 1, 8, 16, 16, 4), Recurrent.MAMBA2
    groups = ((2, beside), (3, recurrent(state, shapes, beside=beside)))
    settings = {"backend": backend, "tp": (4, 8), "block_tokens": blocks, **more}
    return Kind(name, groups, heads=heads, projections=projections, dcp=dcp, **settings)


def _shared(name: str, heads: int = 1, **more: Any) -> Kind:
    """With decode context parallelism over as many ranks as hold the same heads, up to ``dcp``."""
    made = latent() if heads == 1 else full(heads=heads)
    settings = {"backend": "FLASHMLA" if heads == 1 else "FLASH_ATTN", "dcp": (4, 4), "tp": (4, 2, 1), **more}
    return Kind(name, ((5, settings.pop("make", made)),), heads=heads, **settings)


CONTEXT = [
    _shared("MLA, DCP"),
    _shared("MLA, DCP of 2 ranks and of 4", dcp=(2, 4)),
    _shared("MLA, DCP a block at a time to DCP a token at a time", interleave=(16, 1)),
    _shared(
        "MLA, DCP 4 tokens at a time to DCP 6 at a time, blocks of 16 to blocks of 24",
        block_tokens=(16, 24),
        interleave=(4, 6),
    ),
    _shared(
        "MLA with fp8_ds_mla, DCP",
        make=latent(dtype=torch.uint8, cache_dtype_str="fp8_ds_mla", state_content_bytes=656),
        interleave=(1, 8),
    ),
    _shared(
        "MLA of a backend that packs blocks, DCP a block at a time", backend="FLASHMLA_SPARSE", interleave=(16, 16)
    ),
    _shared("MLA, PCP", pcp=(2, 2), dcp=(1, 1)),
    _shared("MLA, PCP and DCP over its ranks to DCP", pcp=(2, 1), dcp=(8, 4), interleave=(1, 16)),
    _shared("Full attention, grouped query, DCP", heads=2, interleave=(1, 4)),
    _shared("Full attention, grouped query, DCP, NHD to HND", heads=2, layouts=(NHD, HND)),
    _shared_hybrid("Gated delta net beside MLA, DCP", 1, (4, 4), interleave=(1, 16)),
    _shared_hybrid("Gated delta net beside MLA, DCP to none", 1, (4, 1)),
    _shared_hybrid("Gated delta net beside MLA, none to DCP", 1, (1, 4), interleave=(1, 8)),
    _shared_hybrid("Mamba 2 beside grouped query attention, DCP", 2, (2, 2), interleave=(4, 1)),
    _shared_hybrid("Mamba 2 beside grouped query attention, none to DCP", 2, (1, 2)),
]
"""Context parallel ranks share out tokens."""
if "dcp_sharded" not in MLAAttentionSpec.__dataclass_fields__:  # before vLLM 0.31, where this is refused
    CONTEXT = []

MAMBA2, MAMBA2_GROUPS = (
    recurrent(
        Recurrent.MAMBA2,
        lambda tp, guesses, groups=groups: Shapes.mamba2_state_shape(tp, 64, groups, 8, 8, 16, 4, guesses),
    )
    for groups in (1, 4)
)
MAMBA1 = recurrent(Recurrent.MAMBA1, lambda tp, _: Shapes.mamba1_state_shape(tp, 64, 16, 4))
GDN = recurrent(Recurrent.GDN_ATTN, lambda tp, guesses: Shapes.gated_delta_net_state_shape(tp, 4, 8, 16, 8, 4, guesses))
SHORT = recurrent(
    Recurrent.SHORT_CONV, lambda tp, guesses: Shapes.short_conv_state_shape(tp, 96, 3, guesses), (torch.bfloat16,)
)
RECURRENT = [
    _hybrid("Mamba 2, one group", MAMBA2, ((64, False), (16, True), (16, True))),
    _hybrid("Mamba 2, several groups", MAMBA2_GROUPS, ((64, False), (64, False), (64, False))),
    _hybrid("Mamba 1", MAMBA1, ((64, False),)),
    _hybrid("Gated delta net", GDN, ((64, False), (64, False), (64, False))),
    _hybrid("Short convolution", SHORT, ((96, False),), tp=(1, 2, 3)),
]

GUESSED = [
    replace(kind, name=f"{kind.name}, guesses: {prefill} at prefill, {decode} at decode", guesses=(prefill, decode))
    for name, prefill, decode in [
        ("Gated delta net", 0, 3),
        ("Gated delta net", 3, 0),
        ("Gated delta net", 2, 5),
        ("Mamba 2, one group", 0, 3),
        ("Mamba 2, several groups", 3, 3),
        ("Short convolution", 3, 1),
    ]
    for kind in RECURRENT
    if kind.name == name
]
"""With speculative decoding on one side or both: the states of guesses move nowhere."""

KINDS = [
    Kind("Full attention, grouped query", ((5, full()),)),
    Kind("Full attention, one KV head on several ranks", ((5, full(heads=2)),), heads=2, tp=(1, 2, 4)),
    Kind("Full attention and sliding windows in KV cache groups", ((2, full()), (3, sliding(24)))),
    Kind("MLA (latent)", ((5, latent()),), heads=1, backend="FLASHMLA", tp=(1, 2, 3)),
    Kind(
        "MLA with fp8_ds_mla",
        ((5, latent(dtype=torch.uint8, cache_dtype_str="fp8_ds_mla", state_content_bytes=656)),),
        heads=1,
        backend="FLASHMLA",
    ),
    Kind("fp8 with a scale per tensor", ((5, full(dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)),)),
    *(
        Kind(
            f"{mode.name.lower().split('_')[0]} with a scale per token and head",
            ((5, scaled(mode, dtype)),),
            backend="TRITON_ATTN",
            block_tokens=(16, 12),
            layouts=(HND, NHD),
        )
        for mode, dtype in (
            (KVQuantMode.FP8_PER_TOKEN_HEAD, torch.float8_e4m3fn),
            (KVQuantMode.INT8_PER_TOKEN_HEAD, torch.int8),
            (KVQuantMode.INT4_PER_TOKEN_HEAD, torch.uint8),
        )
    ),
    Kind("nvfp4, K and V apart", ((5, nvfp4()),), backend="FLASHINFER", tp=(1, 2)),
    Kind("Blocks of 16 tokens to blocks of 48", ((5, full()),), block_tokens=(16, 48)),
    Kind("Blocks of 48 tokens to blocks of 16", ((5, full()),), block_tokens=(48, 16)),
    Kind("Blocks of 16 tokens to blocks of 12", ((5, full()),), block_tokens=(16, 12)),
    Kind("HND to NHD", ((5, full()),), layouts=(HND, NHD)),
    Kind("NHD to HND", ((5, full()),), layouts=(NHD, HND)),
    *(Kind(f"{packed.name} to LBHNC", ((5, full()),), layouts=(packed, HND)) for packed in PACKED),
    *(Kind(f"LBHNC to {packed.name}", ((5, full()),), layouts=(HND, packed)) for packed in PACKED),
    *RECURRENT,
    *GUESSED,
    *CONTEXT,
]
