"""From the tensors that vLLM hands to ``register_kv_caches`` to shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvferry.errors import UnsupportedError
from kvferry.geometry import LayerShard, heads_of_rank

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

SEPARABLE = frozenset(
    {
        *("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "ROCM_ATTN", "ROCM_AITER_FA"),
        *("FLASH_ATTN_MLA", "FLASHMLA", "FLASHINFER_MLA", "CUTLASS_MLA", "TRITON_MLA", "CPU_MLA"),
    }
)
"""Attention backends known to store each token's K and V (or latent) contiguously within a head. With any other one
the inside of a block is opaque and only whole blocks of equal size are moved. CPU_ATTN is of that kind: it packs all K
before all V of a (block, head) slab in an order that depends on the instruction set."""


def shards_of(
    kv_caches: dict[str, torch.Tensor], kv_cache_config: KVCacheConfig, config: VllmConfig, tp_rank: int
) -> tuple[LayerShard, ...]:
    """Describe every layer that this worker caches itself; a layer that shares another one's cache has no spec.

    Args:
        kv_caches: layer name to its view, logically (blocks, heads, tokens, content).
        kv_cache_config: of this worker: its group ids are the engine's, its layer names are its own.

    Raises:
        UnsupportedError: a kind of cache that is not moved yet, or one whose tensor is not what its spec says.
    """
    shards = []
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        for layer in group.layer_names:
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(layer, group.kv_cache_spec)
            if layer not in kv_caches:
                raise UnsupportedError(f"{layer}: has a KV cache spec but vLLM registered no tensor for it")
            shards.append(_shard(layer, kv_caches[layer], spec, group_id, kv_cache_config.num_blocks, config, tp_rank))
    return tuple(shards)


def _shard(
    layer: str, cache: torch.Tensor, spec: Any, group: int, num_blocks: int, config: VllmConfig, tp_rank: int
) -> LayerShard:
    _require_attention(layer, cache, spec)
    latent = "MLA" in type(spec).__name__
    tp_size = config.parallel_config.tensor_parallel_size
    blocks, held, tokens, content = cache.shape
    total = 1 if latent else _total_heads(held, tp_size, config)
    heads = heads_of_rank(total, tp_size, tp_rank)
    whole_blocks = blocks % num_blocks == 0 and tokens * (blocks // num_blocks) == spec.block_size
    if not (whole_blocks and held == spec.num_kv_heads == heads.size):
        raise UnsupportedError(
            f"{layer}: a cache of shape {tuple(cache.shape)} is not {num_blocks} blocks of {spec.block_size} tokens "
            f"with {spec.num_kv_heads} of {total} heads"
        )
    size = cache.element_size()
    block_stride, head_stride, token_stride, _ = (stride * size for stride in cache.stride())
    packing, opaque = _packing(layer, config)
    return LayerShard(
        layer=layer,
        kind="latent" if latent else "attention",
        heads=heads,
        total_heads=total,
        block_tokens=tokens,
        num_blocks=blocks,
        cell_bytes=content * size,
        dtype=str(cache.dtype).removeprefix("torch."),
        packing=packing,
        opaque=opaque,
        group=group,
        address=cache.data_ptr(),
        block_stride=block_stride,
        head_stride=head_stride,
        token_stride=token_stride,
        split=blocks // num_blocks,
        memory="DRAM" if cache.device.type == "cpu" else "VRAM",
        device=cache.device.index or 0,
    )


def _require_attention(layer: str, cache: torch.Tensor, spec: Any) -> None:
    plain = hasattr(spec, "num_kv_heads") and spec.tokens_per_state == 1
    slots = getattr(spec, "num_head_slots", None)
    if not plain or cache.dim() != 4 or cache.stride(-1) != 1 or slots not in (None, spec.num_kv_heads):
        raise UnsupportedError(
            f"{layer}: KVFerry cannot move a {type(spec).__name__} cache of shape {tuple(cache.shape)} yet"
        )


def _total_heads(held: int, tp_size: int, config: VllmConfig) -> int:
    """KV heads of the layer over all ranks. Only a rank with a single head can be a replica of another's."""
    return held * tp_size if held > 1 else min(tp_size, config.model_config.get_total_num_kv_heads())


def _packing(layer: str, config: VllmConfig) -> tuple[str, bool]:
    """Name of the arrangement inside a block, and whether tokens cannot be told apart in it."""
    module = config.compilation_config.static_forward_context[layer]
    backend = module.get_attn_backend().get_name()
    # The CPU backend notes here the instruction set whose packing it uses.
    isa = getattr(module, "isa", None)
    return f"{backend}/{isa}" if isa else backend, backend not in SEPARABLE
