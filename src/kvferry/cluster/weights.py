"""An estimate of the memory that a model's weights take on each rank, from its configuration alone.

Counted are the matrices of decoder layers (attention, dense and expert MLPs with gate, up and down, the router), the
norms and the embeddings, cut the way vLLM cuts them. Left out are biases, vision towers, draft (MTP) layers,
quantisation scales, copies that a backend makes of weights, and everything that is not weights: activations, CUDA
graphs, communication buffers.
"""

from typing import Any

from kvferry.cluster.spec import Layout
from kvferry.geometry import Span, heads_of_rank

LEFT_OUT = (
    "weights are an estimate from config.json without biases, vision towers, draft layers, quantisation scales and "
    "copies made by kernels; activations, CUDA graphs and communication buffers come on top"
)

Config = dict[str, Any]


def weight_bytes(config: Config, layout: Layout, stages: tuple[Span, ...], dtype: str) -> tuple[int, ...]:
    """Bytes of weights per rank, for each pipeline stage; ranks of one stage differ only in which part they hold."""
    dense = 4 if dtype == "float32" else 2
    matrix = _matrix_bytes(config, dense)
    return tuple(
        int(
            sum(_layer(config, layer, layout) for layer in range(*held)) * matrix
            + 2 * held.size * config["hidden_size"] * dense
            + _embeddings(config, layout, first=not held.start, last=held is stages[-1]) * dense
        )
        for held in stages
    )


def _matrix_bytes(config: Config, dense: int) -> float:
    """Bytes per element of a layer's matrices, quantised or not; an unknown scheme counts as unquantised."""
    scheme = config.get("quantization_config")
    if not isinstance(scheme, dict):
        return dense
    if isinstance(bits := scheme.get("bits"), int) and 0 < bits <= 8 * dense:
        return bits / 8
    return {"fp8": 1, "mxfp4": 0.5}.get(str(scheme.get("quant_method")), dense)


def _layer(config: Config, layer: int, layout: Layout) -> int:
    """Matrix elements of one decoder layer on one rank."""
    attention = _latent_attention if config.get("kv_lora_rank") else _attention
    feed_forward = _experts(config, layout) if _is_sparse(config, layer) else _dense(config, layout)
    return attention(config, layout.tp) + feed_forward


def _attention(config: Config, tp: int) -> int:
    """Q and output are cut by heads; K and V too, but a rank keeps one head at least (``QKVParallelLinear``)."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_size = config.get("head_dim") or hidden // heads
    kv_heads = heads_of_rank(config.get("num_key_value_heads") or heads, tp, 0).size
    return int(2 * hidden * head_size * (heads // tp + kv_heads))


def _latent_attention(config: Config, tp: int) -> int:
    """MLA (``DeepseekV2MLAAttention``): projections down to the latents whole on every rank, those up cut by heads."""
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"] // tp, config["kv_lora_rank"]
    rope = config.get("qk_rope_head_dim") or 0
    nope = config.get("qk_nope_head_dim") or config.get("head_dim") or hidden // config["num_attention_heads"]
    value = config.get("v_head_dim") or nope
    rank = config.get("q_lora_rank")
    query = hidden * rank + rank * heads * (nope + rope) if rank else hidden * heads * (nope + rope)
    return int(query + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden)


def _dense(config: Config, layout: Layout) -> int:
    inner = config.get("intermediate_size") or 4 * config["hidden_size"]
    return int(3 * config["hidden_size"] * inner // layout.tp)


def _experts(config: Config, layout: Layout) -> int:
    """Experts are cut over all tp x pcp x dp ranks of a stage, with or without expert parallelism, shared experts over
    tp, the router not at all (``FusedMoEParallelConfig``)."""
    hidden, experts = config["hidden_size"], _expert_count(config)
    inner = config.get("moe_intermediate_size") or config.get("intermediate_size") or 4 * hidden
    routed = 3 * hidden * inner * experts // (layout.ranks * layout.dp)
    shared_inner = config.get("shared_expert_intermediate_size") or inner * (config.get("n_shared_experts") or 0)
    return int(routed + 3 * hidden * shared_inner // layout.tp + hidden * experts)


def _expert_count(config: Config) -> int:
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    return next((config[name] for name in names if config.get(name)), 0)


def _is_sparse(config: Config, layer: int) -> bool:
    """Whether a layer has experts: DeepSeek's leading dense layers, Qwen's step and list of dense layers."""
    if not _expert_count(config) or layer < (config.get("first_k_dense_replace") or 0):
        return False
    step = config.get("decoder_sparse_step") or 1
    return layer not in (config.get("mlp_only_layers") or ()) and (layer + 1) % step == 0


def _embeddings(config: Config, layout: Layout, first: bool, last: bool) -> int:
    """Elements of input and output embeddings, cut over tp; tied ones are stored once where a stage has both."""
    tied = bool(config.get("tie_word_embeddings", False)) and first
    copies = first + (last and not tied)
    norm = config["hidden_size"] if last else 0
    return int(copies * (config.get("vocab_size") or 0) * config["hidden_size"] // layout.tp) + norm
