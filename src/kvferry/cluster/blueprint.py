"""Engines that do not exist: from a model's configuration and a layout to what every worker would hold.

The result is the same `EngineLayout` that running engines describe themselves with, so that the functions of
`kvferry.geometry` plan for it what the connector would do. Addresses are made up, one distant range per layer.
"""

from dataclasses import dataclass, replace
from typing import Any

from kvferry.cluster.spec import Layout, kv_bytes_per_token
from kvferry.errors import SpecError
from kvferry.geometry import EngineLayout, Fingerprint, LayerShard, Span, WorkerShards, heads_of_rank
from kvferry.geometry.layout import Kind

DTYPES = ("bfloat16", "float16", "float32")
REQUIRED = ("num_hidden_layers", "num_attention_heads", "hidden_size")
OPTIONAL = (
    *("num_key_value_heads", "head_dim", "kv_lora_rank", "q_lora_rank"),
    *("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "vocab_size"),
    *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("n_routed_experts", "num_local_experts", "num_experts", "n_shared_experts"),
    *("first_k_dense_replace", "decoder_sparse_step"),
)
"""Sizes that may be missing, null or 0."""
MOVABLE_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
SIZE_LIMIT = 1 << 20
LAYER_BYTES = 1 << 40
"""Distance of made-up layer addresses: no two layers of a worker touch, as in vLLM, which gives each its tensor."""


@dataclass(frozen=True)
class CacheShape:
    """The KV cache of one token of a model.

    Attributes:
        layers: attention layers that cache.
        heads: KV heads over all ranks; 1 for a latent cache.
        cell_bytes: bytes of one (layer, head, token): K and V together, or the latent vector.
    """

    kind: Kind
    layers: int
    heads: int
    cell_bytes: int
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        """Bytes over all layers and heads, each once."""
        return self.layers * self.heads * self.cell_bytes


@dataclass(frozen=True)
class Blocks:
    """A cache of `count` blocks of `tokens` tokens per layer."""

    tokens: int
    count: int


def cache_shape(config: dict[str, Any], dtype: str) -> CacheShape:
    """The cache that ``kv_bytes_per_token`` counts, cut into cells.

    Raises:
        SpecError: the configuration lacks a size, or has one that is no positive whole number.
    """
    _require_sizes(config)
    latent = bool(config.get("kv_lora_rank"))
    layers = config["num_hidden_layers"]
    heads = 1 if latent else config.get("num_key_value_heads") or config["num_attention_heads"]
    cell_bytes = kv_bytes_per_token(config, dtype) // layers // heads
    if not cell_bytes:
        raise SpecError("config.json: hidden_size is smaller than num_attention_heads, so a head has no size")
    return CacheShape("latent" if latent else "attention", layers, heads, cell_bytes, dtype)


def _require_sizes(config: dict[str, Any]) -> None:
    for key in REQUIRED:
        if key not in config:
            raise SpecError(f"config.json has no {key}; kvferry plan needs {', '.join(REQUIRED)}")
    for key in (*REQUIRED, *(key for key in OPTIONAL if config.get(key) is not None)):
        value, least = config[key], int(key in REQUIRED)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= SIZE_LIMIT:
            raise SpecError(f"config.json: {key}={value!r} is not a whole number from {least} to {SIZE_LIMIT}")


def unmovable(config: dict[str, Any]) -> list[str]:
    """Reasons why KVFerry cannot move this model's cache, whatever the layouts."""
    kinds = config.get("layer_types")
    strange = {str(kind) for kind in kinds} - MOVABLE_LAYERS if isinstance(kinds, list) else set()
    return [f"{kind} layers keep a state that KVFerry does not move" for kind in sorted(strange)]


def stages(layers: int, layout: Layout) -> tuple[Span, ...]:
    """The layers of each pipeline stage.

    Without a partition by vLLM's rule (``get_pp_indices`` in ``vllm/distributed/utils.py``): as many layers for each
    stage, and what is left over one each for the last stages but the very last.
    """
    sizes = list(layout.partition or [layers // layout.pp] * layout.pp)
    if layout.partition is None:
        for back in range(2, layers % layout.pp + 2):
            sizes[-back] += 1
    return tuple(Span(sum(sizes[:stage]), sum(sizes[: stage + 1])) for stage in range(layout.pp))


def blueprint(shape: CacheShape, layout: Layout, blocks: Blocks) -> EngineLayout:
    """One engine core of ``layout``, stored heads outermost within a block, as the connector asks vLLM for (HND).

    The packing is taken to be separable, which GPU backends are; the core is one of ``layout.dp`` equal ones.
    """
    workers = [
        WorkerShards(pp_rank, tp_rank, _shards(shape, held, heads_of_rank(shape.heads, layout.tp, tp_rank), blocks))
        for pp_rank, held in enumerate(stages(shape.layers, layout))
        for tp_rank in range(layout.tp)
    ]
    fingerprint = Fingerprint("blueprint", 1, "any")
    return EngineLayout(f"blueprint {layout}", layout.tp, layout.pp, 0, fingerprint, tuple(workers))


def one_layer(shape: CacheShape, layout: Layout, blocks: Blocks) -> EngineLayout:
    """The tensor parallel ranks of any one pipeline stage, with one of its layers.

    Who reads which heads from which tensor parallel rank depends on neither layer nor stage, so planning this is
    planning all.
    """
    return blueprint(replace(shape, layers=1), replace(layout, pp=1, partition=None), blocks)


def _shards(shape: CacheShape, layers: Span, heads: Span, blocks: Blocks) -> tuple[LayerShard, ...]:
    head_stride = shape.cell_bytes * blocks.tokens
    return tuple(
        LayerShard(
            layer=f"model.layers.{layer}.self_attn.attn",
            kind=shape.kind,
            heads=heads,
            total_heads=shape.heads,
            block_tokens=blocks.tokens,
            num_blocks=blocks.count,
            cell_bytes=shape.cell_bytes,
            dtype=shape.dtype,
            packing="separable",
            opaque=False,
            group=0,
            address=(1 + index) * LAYER_BYTES,
            block_stride=head_stride * heads.size,
            head_stride=head_stride,
            token_stride=shape.cell_bytes,
            memory="VRAM",
        )
        for index, layer in enumerate(range(*layers))
    )
