"""Where vLLM's GPU workers put tokens: its own kernel, under Triton's interpreter."""

from __future__ import annotations

import types
from functools import lru_cache

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction
from vllm.v1.worker.block_table import ComputeSlotMappingKernel

ELSEWHERE = -1
"""In place of a slot: another context parallel rank holds the token."""


def _interpreted() -> InterpretedFunction:
    """The kernel as it is written. Without a GPU vLLM leaves it bare, and Triton's language out of its sight."""
    written = ComputeSlotMappingKernel.__dict__["kernel"].__func__
    written = getattr(written, "fn", written)
    seen = {**written.__globals__, "tl": triton.language}
    return InterpretedFunction(types.FunctionType(written.__code__, seen, written.__name__))


_kernel = _interpreted()


@lru_cache
def slot_mapping(blocks: tuple[int, ...], block_tokens: int, dcp: tuple[int, int], interleave: int) -> torch.Tensor:
    """The slot of each token that fits into a request's ``blocks``, as (block x tokens per block + token in it).

    Args:
        block_tokens: that a worker holds of a block.
        dcp: size and rank.
    """
    size, rank = dcp
    count = len(blocks) * block_tokens * size
    found = torch.empty(count, dtype=torch.int64)
    table, starts = torch.tensor([blocks], dtype=torch.int32), torch.tensor([0, count], dtype=torch.int32)
    _kernel[(2,)](
        *(count, count, starts, torch.arange(count), table, len(blocks), found),
        KV_CACHE_BLOCK_SIZE=block_tokens,
        TOTAL_CP_WORLD_SIZE=size,
        TOTAL_CP_RANK=rank,
        CP_KV_CACHE_INTERLEAVE_SIZE=interleave,
        PAD_ID=ELSEWHERE,
        BLOCK_SIZE=1024,
    )
    return found
