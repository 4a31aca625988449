"""From the tensors that vLLM hands to ``register_kv_caches`` to shards."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import MambaSpec

from kvferry.errors import UnsupportedError
from kvferry.geometry import ALL_TOKENS, LayerShard, TokenShare, heads_of_rank

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

SEPARABLE = frozenset(
    {
        *("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "ROCM_ATTN", "ROCM_AITER_FA"),
        *("FLASH_ATTN_MLA", "FLASHMLA", "FLASHINFER_MLA", "CUTLASS_MLA", "TRITON_MLA", "CPU_MLA"),
        "AMX_MLA",
    }
)
"""Attention backends known to store each token's K and V (or latent) contiguously within a head. With any other one
the inside of a block is opaque and only whole blocks of equal size are moved. CPU_ATTN is of that kind: it packs all K
before all V of a (block, head) slab in an order that depends on the instruction set."""


POSITIONAL = frozenset(
    {
        *("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec", "RSWASpec"),
        *("MLAAttentionSpec", "SlidingWindowMLASpec"),
    }
)
"""Specs whose block lists say by position where which token is. Any other one is refused until somebody has looked."""

DRAFTERS = frozenset({"draft_model", "mtp"})
"""Modules that only a drafter has, by which its layers are named."""

SEPARABLE_QUANTISATION = frozenset({"NONE", "FP8_PER_TENSOR"})
"""Ways of storing elements in which a token's are together, beside those that put one scale behind each (token, head).
What others do inside a block nobody has looked at."""


def shards_by_layer(
    kv_caches: Mapping[str, torch.Tensor],
    kv_cache_config: KVCacheConfig,
    config: VllmConfig,
    tp_rank: int,
    dcp_rank: int = 0,
) -> dict[str, tuple[LayerShard, ...]]:
    """Describe every layer that this worker caches itself; a layer that shares another one's cache has no spec.

    Args:
        kv_caches: layer name to its view, logically (blocks, heads, tokens, content).
        kv_cache_config: of this worker: its group ids are the engine's, its layer names are its own.
        dcp_rank: in its group of decode context parallelism.

    Raises:
        UnsupportedError: kinds of cache that are not moved, or tensors that are not what their specs say; of every
            layer, in one text.
    """
    view = _View(kv_cache_config, config, tp_rank, dcp_rank)
    layers: dict[str, tuple[LayerShard, ...]] = {}
    reasons = []
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        for layer in group.layer_names:
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(layer, group.kv_cache_spec)
            try:
                if layer not in kv_caches:
                    raise UnsupportedError(f"{layer}: has a KV cache spec but vLLM registered no tensor for it")
                layers[layer] = tuple(view.shards(layer, kv_caches[layer], spec, group_id))
            except (UnsupportedError, ValueError) as error:
                reasons.append(str(error))
    if reasons:
        raise UnsupportedError("; ".join(reasons))
    return layers


@dataclass(frozen=True, slots=True)
class _View:
    """From specs and tensors of one worker to its shards."""

    kv_cache_config: KVCacheConfig
    config: VllmConfig
    tp_rank: int
    dcp_rank: int

    def shards(self, layer: str, cache: torch.Tensor, spec: Any, group: int) -> Iterable[LayerShard]:
        where = {
            "group": group,
            "draft": self._is_draft(layer),
            "memory": "DRAM" if cache.device.type == "cpu" else "VRAM",
            "device": cache.device.index or 0,
        }
        if isinstance(spec, MambaSpec):
            # Here, so that nothing but a recurrent layer depends on what vLLM has for them.
            from kvferry.vllm.state_view import state_shards

            rank, size = self.tp_rank, self.config.parallel_config.tensor_parallel_size
            return state_shards(layer, cache, spec, self._module(layer), rank, size, **where)
        return self._attention(layer, cache, spec, **where)

    def _is_draft(self, layer: str) -> bool:
        """Whether a layer is the drafter's: such layers lie in a module of its own or count on after the model's."""
        if getattr(self.config, "speculative_config", None) is None:
            return False
        number = re.search(r"\.(\d+)\.", layer)
        last = self.config.model_config.get_total_num_hidden_layers()
        return not DRAFTERS.isdisjoint(layer.split(".")) or (number is not None and int(number[1]) >= last)

    def _module(self, layer: str) -> Any:
        return self.config.compilation_config.static_forward_context[layer]

    def _attention(self, layer: str, cache: torch.Tensor, spec: Any, **where: Any) -> Iterator[LayerShard]:
        halves = _halves(layer, cache, spec)
        latent = "MLA" in type(spec).__name__
        tp_size = self.config.parallel_config.tensor_parallel_size
        num_blocks = self.kv_cache_config.num_blocks
        blocks, _, tokens, content = cache.shape
        held = spec.num_kv_heads
        total = 1 if latent else self._total_heads(held, spec)
        heads = heads_of_rank(total, tp_size, self.tp_rank)
        whole_blocks = blocks % num_blocks == 0 and tokens * (blocks // num_blocks) == spec.block_size
        if not (whole_blocks and held == heads.size):
            raise UnsupportedError(
                f"{layer}: a cache of shape {tuple(cache.shape)} is not {num_blocks} blocks of {spec.block_size} "
                f"tokens with {spec.num_kv_heads} of {total} heads"
            )
        size = cache.element_size()
        block_stride, head_stride, token_stride, _ = (stride * size for stride in cache.stride())
        packing, opaque = self._packing(layer, spec)
        for number, half in enumerate(halves):
            yield LayerShard(
                layer=layer + half,
                kind="latent" if latent else "attention",
                heads=heads,
                total_heads=total,
                block_tokens=tokens,
                num_blocks=blocks,
                cell_bytes=content * size,
                dtype=str(cache.dtype).removeprefix("torch."),
                packing=packing,
                opaque=opaque,
                address=cache.data_ptr() + number * held * head_stride,
                block_stride=block_stride,
                head_stride=head_stride,
                token_stride=token_stride,
                split=blocks // num_blocks,
                share=self._share(spec),
                whole=getattr(self.kv_cache_config, "needs_kv_cache_zeroing", False),
                **where,
            )

    def _share(self, spec: Any) -> TokenShare:
        """Prefill context parallelism shares out no cache: its ranks gather K and V, and all of them keep all."""
        parallel = self.config.parallel_config
        size = parallel.decode_context_parallel_size
        # A drafter may keep a whole cache on each rank of a model that does not.
        if size == 1 or not spec.dcp_sharded:
            return ALL_TOKENS
        return TokenShare(size, self.dcp_rank, parallel.cp_kv_cache_interleave_size)

    def _total_heads(self, held: int, spec: Any) -> int:
        """KV heads of the layer over all ranks. Only a rank with a single head can be a replica of another's."""
        tp_size = self.config.parallel_config.tensor_parallel_size
        if held > 1:
            return held * tp_size
        shards = getattr(spec, "max_tp_shards", None) or self.config.model_config.get_total_num_kv_heads()
        return min(tp_size, shards)

    def _packing(self, layer: str, spec: Any) -> tuple[str, bool]:
        """Name of the arrangement inside a block, and whether tokens cannot be told apart in it."""
        module = self._module(layer)
        backend = module.get_attn_backend().get_name()
        mode = getattr(spec, "kv_quant_mode", None)
        name = "NONE" if mode is None else mode.name
        separable = name in SEPARABLE_QUANTISATION or (mode is not None and mode.is_per_token_head)
        # The CPU backend notes here the instruction set whose packing it uses.
        parts = [backend, getattr(module, "isa", None), None if name == "NONE" else name]
        return "/".join(part for part in parts if part), backend not in SEPARABLE or not separable


def _halves(layer: str, cache: torch.Tensor, spec: Any) -> tuple[str, ...]:
    """Suffixes of the shards that a layer is: one, or one each for K and V, whose heads lie behind each other.

    Raises:
        UnsupportedError: it is neither.
    """
    heads: int = getattr(spec, "num_kv_heads", 0)
    slots = getattr(spec, "num_head_slots", None) or heads
    plain = (
        type(spec).__name__ in POSITIONAL
        and getattr(spec, "tokens_per_state", 1) == 1
        and not getattr(spec, "prefix_replay_tokens", 0)
    )
    if plain and cache.dim() == 4 and cache.stride(-1) == 1 and cache.shape[1] == slots:
        if slots == heads:
            return ("",)
        if slots == 2 * heads and heads > 1:
            return (".k", ".v")
    raise UnsupportedError(
        f"{layer}: KVFerry cannot move a {type(spec).__name__} cache of shape {tuple(cache.shape)}"
        + (f" whose {slots} slots are not its {heads} heads" if plain and slots != heads else "")
    )
