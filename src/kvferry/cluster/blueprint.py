"""Engines that do not exist: from a model's configuration and a layout to what every worker would hold.

The result is the same `EngineLayout` that running engines describe themselves with, so that the functions of
`kvferry.geometry` plan for it what the connector would do. Addresses are made up, one distant range per layer.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from kvferry.cluster.spec import Layout, kv_bytes_per_token
from kvferry.cluster.states import Part, state_parts
from kvferry.errors import SpecError
from kvferry.geometry import (
    ALL_TOKENS,
    EngineLayout,
    Fingerprint,
    LayerShard,
    Span,
    TokenShare,
    WorkerShards,
    heads_of_rank,
)
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
CACHING = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
SIZE_LIMIT = 1 << 20
LAYER_BYTES = 1 << 40
"""Distance of made-up layer addresses: no two layers of a worker touch, as in vLLM, which gives each its tensor."""


@dataclass(frozen=True)
class CacheShape:
    """The cache of a model: of each token in most layers, of each request in recurrent ones.

    Attributes:
        layers: of the model.
        heads: KV heads over all ranks; 1 for a latent cache.
        cell_bytes: bytes of one (layer, head, token): K and V together, or the latent vector.
        recurrent: layers that keep a state instead.
        state: its parts, the same in each of them.
        whole: blocks are loaded to their end, as they are beside states (see ``LayerShard``).
    """

    kind: Kind
    layers: int
    heads: int
    cell_bytes: int
    dtype: str
    recurrent: frozenset[int] = frozenset()
    state: tuple[Part, ...] = ()
    whole: bool = False

    def caching(self, layers: Span) -> int:
        """How many of ``layers`` cache tokens."""
        return layers.size - self.keeping(layers)

    def keeping(self, layers: Span) -> int:
        """How many of ``layers`` keep a state."""
        return len(self.recurrent & set(range(*layers)))

    @property
    def bytes_per_token(self) -> int:
        """Bytes over all layers and heads, each once."""
        return self.caching(Span(0, self.layers)) * self.heads * self.cell_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of a request's states over all layers, whatever the number of its tokens, each once."""
        return len(self.recurrent) * sum(part.cells * part.cell_bytes for part in self.state)

    def state_bytes_per_rank(self, tp: int) -> int:
        """Bytes of one layer's state on a tensor parallel rank."""
        return sum(part.cells // (1 if part.repeated else tp) * part.cell_bytes for part in self.state)


@dataclass(frozen=True)
class Blocks:
    """A cache of `count` blocks of `tokens` tokens per layer."""

    tokens: int
    count: int


def cache_shape(config: dict[str, Any], dtype: str) -> CacheShape:
    """The cache that ``kv_bytes_per_token`` counts, cut into cells, and the states of recurrent layers.

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
    kinds = config.get("layer_types")
    kept = {at for at, kind in enumerate(kinds) if kind not in CACHING} if isinstance(kinds, list) else set()
    return CacheShape(
        *("latent" if latent else "attention", layers, heads, cell_bytes, dtype),
        frozenset(kept & set(range(layers))),
        state_parts(config, dtype),
    )


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
    strange = {str(kind) for kind in kinds} - CACHING if isinstance(kinds, list) else set()
    if state_parts(config, DTYPES[0]):
        return []
    return [f"config.json does not say in known terms what {kind} layers keep of a request" for kind in sorted(strange)]


def unsplit_states(shape: CacheShape, layout: Layout) -> list[str]:
    """Reasons why tensor parallelism cannot deal out the states of recurrent layers; vLLM has the same rule."""
    odd = {part.units for part in shape.state if shape.recurrent and not part.repeated and part.units % layout.tp}
    return [f"{units} heads or channels of a state cannot be split over tp={layout.tp}" for units in sorted(odd)]


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
        WorkerShards(pp_rank, rank, tuple(_shards(shape, held, rank, layout, blocks)))
        for pp_rank, held in enumerate(stages(shape.layers, layout))
        for rank in range(layout.ranks)
    ]
    fingerprint = Fingerprint("blueprint", 1, "any")
    return EngineLayout(f"blueprint {layout}", layout.tp, layout.pp, 0, fingerprint, tuple(workers))


def one_layer(shape: CacheShape, layout: Layout, blocks: Blocks, recurrent: bool = False) -> EngineLayout:
    """The ranks of any one pipeline stage, with one of its layers.

    Who reads which heads and tokens from which rank depends on neither layer nor stage, so planning this is planning
    all.
    """
    one = replace(shape, layers=1, recurrent=frozenset({0} if recurrent else ()))
    return blueprint(one, replace(layout, pp=1, partition=None), blocks)


def published(engine: EngineLayout, layout: Layout) -> EngineLayout:
    """What peers are shown of an engine: of replicas by prefill context parallelism vLLM's handshake has the last."""
    if layout.dcp > 1:
        return engine
    last = layout.ranks - layout.tp
    return replace(engine, workers=tuple(worker for worker in engine.workers if worker.tp_rank >= last))


def _share(layout: Layout, pcp_rank: int, tp_rank: int) -> TokenShare:
    """As in vLLM's ``initialize_model_parallel``: a group spans ranks of prefill context parallelism first."""
    if layout.dcp == 1:
        return ALL_TOKENS
    return TokenShare(layout.dcp, (tp_rank * layout.pcp + pcp_rank) % layout.dcp, layout.interleave)


def _shards(shape: CacheShape, layers: Span, rank: int, layout: Layout, blocks: Blocks) -> Iterator[LayerShard]:
    pcp_rank, tp_rank = divmod(rank, layout.tp)
    heads = heads_of_rank(shape.heads, layout.tp, tp_rank)
    share = _share(layout, pcp_rank, tp_rank)
    for index, layer in enumerate(range(*layers)):
        address = (1 + index) * LAYER_BYTES
        if layer in shape.recurrent:
            yield from _states(shape, layer, tp_rank, layout.tp, blocks, address)
            continue
        head_stride = shape.cell_bytes * blocks.tokens
        yield LayerShard(
            layer=f"model.layers.{layer}.self_attn.attn",
            kind=shape.kind,
            heads=heads,
            total_heads=shape.heads,
            cell_bytes=shape.cell_bytes,
            address=address,
            block_stride=head_stride * heads.size,
            head_stride=head_stride,
            token_stride=shape.cell_bytes,
            share=share,
            whole=shape.whole,
            **_alike(shape, blocks),
        )


def _states(shape: CacheShape, layer: int, rank: int, tp: int, blocks: Blocks, address: int) -> Iterator[LayerShard]:
    """The parts of a state behind each other in a page, each cut by itself (see ``kvferry.vllm.state_view``)."""
    page = shape.state_bytes_per_rank(tp)
    for part in shape.state:
        copies = tp if part.repeated else 1
        held, index = part.cells * copies // tp, rank // copies
        yield LayerShard(
            layer=f"model.layers.{layer}.{part.name}",
            kind="state",
            heads=Span(index * held, (index + 1) * held),
            total_heads=part.cells,
            cell_bytes=part.cell_bytes,
            address=address,
            block_stride=page,
            head_stride=part.cell_bytes,
            token_stride=0,
            **_alike(shape, blocks),
        )
        address += held * part.cell_bytes


def _alike(shape: CacheShape, blocks: Blocks) -> dict[str, Any]:
    return {
        "block_tokens": blocks.tokens,
        "num_blocks": blocks.count,
        "dtype": shape.dtype,
        "packing": "separable",
        "opaque": False,
        "group": 0,
        "memory": "VRAM",
    }
