"""Where vLLM's GPU workers put tokens: its own kernel, under Triton's interpreter."""

from __future__ import annotations

import inspect
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
    given = {
        "num_tokens": count,
        "max_num_tokens": count,
        "query_start_loc_ptr": starts,
        "positions_ptr": torch.arange(count),
        "block_table_ptr": table,
        "block_table_stride": len(blocks),
        "slot_mapping_ptr": found,
        "KV_CACHE_BLOCK_SIZE": block_tokens,
        "TOTAL_CP_WORLD_SIZE": size,
        "TOTAL_CP_RANK": rank,
        "CP_KV_CACHE_INTERLEAVE_SIZE": interleave,
        "PAD_ID": ELSEWHERE,
        "BLOCK_SIZE": 1024,
        # Before vLLM 0.32 the kernel also cut blocks into those of the attention kernel.
        "block_size": block_tokens,
        "BLOCKS_PER_KV_BLOCK": 1,
    }
    _kernel[(2,)](**{name: given[name] for name in inspect.signature(_kernel.fn).parameters})
    return found
