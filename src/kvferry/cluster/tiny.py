"""Tiny models with random weights, for tests: real architectures, a tokenizer trained on the spot.

The weights are scaled so that greedy tokens depend on the whole prompt; with the usual initialisation every prompt
gives the same tokens and a test that compares tokens would prove nothing.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvferry.cluster.cache import cached
from kvferry.errors import ModelError

RECIPE_VERSION = 1
VOCABULARY = 384  # divisible by 64 times 2 and 3, as vLLM's vocabulary shards for those TP sizes want
MAX_POSITIONS = 4096
SEED = 20
EMBEDDING_STD = 1.0
ATTENTION_GAIN = 2.0  # on queries and keys: peaked attention, so single tokens of a long prompt matter
BODY_GAIN = 1.0

WINDOW = 128
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"

TRAINING_TEXT = (
    "The ferry crosses the river every hour. It carries people, bicycles and cars from one bank to the other, "
    "and it returns with whoever wants to go back. What is the capital of France? The capital of France is Paris. "
    "How many bridges cross the river? There are seven bridges, two of stone and five of iron. "
    "0123456789 + - * / = ( ) [ ] { } < > user assistant system once upon a time there was a keeper of the lock."
)
IMAGE_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "attention_dropout": 0.0,
}


def _grouped_query(model_type: str, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": heads * 32,
        "intermediate_size": heads * 64,
        "num_hidden_layers": 4,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **_COMMON,
        **more,
    }


RECIPES: dict[str, dict[str, Any]] = {
    "qwen2": _grouped_query("qwen2", 8, 4),
    "qwen2-6heads": _grouped_query("qwen2", 6, 6),
    "qwen3": _grouped_query("qwen3", 8, 4, head_dim=32),
    # 65,536 bytes of KV cache per token in bfloat16, and little to compute: for benchmarks, never for equality.
    "qwen3-fat": _grouped_query(
        *("qwen3", 16, 16),
        head_dim=128,
        num_hidden_layers=8,
        hidden_size=256,
        intermediate_size=512,
        max_position_embeddings=16384,
    ),
    "llama": _grouped_query("llama", 8, 2),
    # Full attention and sliding windows, in several KV cache groups of unequal length: what lies out of the window is
    # held by neither side. A small query_pre_attn_scalar does for normed queries what ATTENTION_GAIN does for others.
    "gemma3": _grouped_query(
        "gemma3_text",
        8,
        4,
        head_dim=32,
        query_pre_attn_scalar=2,
        sliding_window=WINDOW,
        num_hidden_layers=5,
        layer_types=[_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL],
    ),
    # Recurrent states beside full attention: Mamba 2 with one group, which every rank repeats, and a gated delta net.
    "granite4": _grouped_query(
        "granitemoehybrid",
        8,
        4,
        shared_intermediate_size=512,
        num_local_experts=0,
        attention_multiplier=0.2,
        mamba_n_heads=8,
        mamba_n_groups=1,
        mamba_d_state=32,
        layer_types=[_LINEAR, _FULL, _LINEAR, _FULL],
    ),
    "qwen3-next": _grouped_query(
        "qwen3_next",
        8,
        4,
        head_dim=32,
        linear_key_head_dim=128,  # less is refused by the CPU kernel
        linear_value_head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        # vLLM wants a mixture of experts in each stage and in the predictor, whose layer is number 0; with all experts
        # in use none is chosen differently.
        num_experts=2,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        mlp_only_layers=[1, 2],
        layer_types=[_LINEAR, _FULL, _LINEAR, _FULL],
        num_nextn_predict_layers=1,
    ),
    # Multi-token prediction whose guesses are right wherever its cache is: the model is one layer, and so is the
    # predictor, which differs only in that it does not see a prompt's first two tokens.
    "mimo": _grouped_query("qwen2", 8, 4, num_hidden_layers=1, num_nextn_predict_layers=1),
    "lfm2": _grouped_query(
        "lfm2",
        8,
        4,
        conv_L_cache=3,
        conv_dim=256,
        block_dim=256,
        block_auto_adjust_ff_dim=False,
        layer_types=["conv", _FULL, "conv", _FULL],
    ),
    # Images: 4 places in a prompt stand for one, since the vision tower's 16 patches are put together by 2 x 2.
    "idefics3": {
        "model_type": "idefics3",
        "image_token_id": 2,
        "pad_token_id": 1,
        "scale_factor": 2,
        "text_config": _grouped_query("llama", 8, 4),
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 14,
        },
    },
    # Multi-head latent attention. vLLM's CPU kernel wants a latent of 512 + 64; every layer is dense because the CPU
    # kernel for mixtures of experts refuses float32, which equality needs. About the endless rope_theta: the
    # rotary kernel of vLLM 0.32 on CPU rotates a 3-D query of several heads wrongly, and differently with the number
    # of tokens in the batch, so that a plain engine's prefill and decode disagree with each other. With this theta only
    # the first pair of channels rotates at all, and `_still_queries` silences that one.
    "deepseek-v2": _grouped_query(
        "deepseek_v2",
        4,
        4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        head_dim=64,
        first_k_dense_replace=4,
        n_routed_experts=2,
        n_shared_experts=1,
        num_experts_per_tok=1,
        moe_intermediate_size=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1e300},
    ),
}


class Predictor(NamedTuple):
    """Where the weights of a layer for multi-token prediction are in a checkpoint.

    Attributes:
        architecture: of the model that vLLM looks for it in.
        layer: prefix of the transformer layer's.
        join: makes the layer's input of the embedding of the next token and the hidden state.
        embedding: whether the embedding is the first (0) or the second (1) of the two.
        norms: of either of these, and of what the layer gives.
        neutral: the weight with which a norm scales nothing.
    """

    architecture: str
    layer: str
    join: str
    embedding: int
    norms: tuple[str, ...]
    neutral: float


PREDICTORS = {
    "mimo": Predictor(
        *("MiMoForCausalLM", "model.mtp_layers.0.", "model.mtp_layers.0.input_proj", 1),
        tuple(f"model.mtp_layers.0.{name}_layernorm" for name in ("token", "hidden", "final")),
        neutral=1.0,
    ),
    "qwen3-next": Predictor(
        *("Qwen3NextForCausalLM", "mtp.layers.0.", "mtp.fc", 0),
        ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
        neutral=0.0,
    ),
}
"""By tiny model."""


def tiny(kind: str, directory: Path | None = None) -> Path:
    """The directory of a tiny model, made the first time (a few seconds) and cached by its recipe.

    Raises:
        ModelError: there is no such kind.
    """
    if kind not in RECIPES:
        raise ModelError(f"no tiny model {kind!r}; there are {', '.join(RECIPES)}")
    return cached(f"tiny-{kind}-{_fingerprint(kind)}", lambda path: _build(kind, path), directory)


def _fingerprint(kind: str) -> str:
    recipe = [RECIPE_VERSION, SEED, EMBEDDING_STD, ATTENTION_GAIN, BODY_GAIN, TRAINING_TEXT, CHAT_TEMPLATE]
    recipe += [PREDICTORS[kind]] if kind in PREDICTORS else []
    return hashlib.sha256(json.dumps([*recipe, RECIPES[kind]], sort_keys=True).encode()).hexdigest()[:12]


def _build(kind: str, directory: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    recipe = dict(RECIPES[kind])
    config = AutoConfig.for_model(recipe.pop("model_type"), **recipe)
    sees = hasattr(config, "vision_config")
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_config(config, dtype=torch.float32)
        _scale_weights(model)
        if config.model_type == "deepseek_v2":
            _still_queries(model)
        if kind in PREDICTORS:
            _norm_embeddings(model)
    model.save_pretrained(directory)
    if kind in PREDICTORS:
        _save_predictor(PREDICTORS[kind], config, directory)
    tokenizer = _tokenizer(IMAGE_TOKENS if sees else ())
    tokenizer.save_pretrained(directory)
    if sees:
        _processor(config, tokenizer).save_pretrained(directory)


def _scale_weights(model: Any) -> None:
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if (std := _std(name, weight)) is not None:
                weight.normal_(0.0, std)


def _still_queries(model: Any) -> None:
    """Zero the only channels of a latent-attention query that its position would rotate."""
    import torch

    config = model.config
    with torch.no_grad():
        for layer in model.model.layers:
            heads = layer.self_attn.q_proj.weight.view(config.num_attention_heads, config.qk_head_dim, -1)
            heads[:, config.qk_nope_head_dim : config.qk_nope_head_dim + 2] = 0.0


def _norm_embeddings(model: Any) -> None:
    """Let embeddings be what a predictor, which norms them first, makes of them."""
    import torch

    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight /= weight.square().mean(dim=1, keepdim=True).sqrt()


def _save_predictor(predictor: Predictor, config: Any, directory: Path) -> None:
    """What checkpoints have of multi-token prediction and transformers does not know: a copy of the model's last layer,
    which sees the next token and nothing of the hidden state."""
    import torch
    from safetensors.torch import load_file, save_file

    last, hidden = f"model.layers.{config.num_hidden_layers - 1}.", config.hidden_size
    weights = {
        predictor.layer + name.removeprefix(last): weight
        for name, weight in load_file(directory / "model.safetensors").items()
        if name.startswith(last)
    }
    weights |= {f"{name}.weight": torch.full((hidden,), predictor.neutral) for name in predictor.norms}
    weights[f"{predictor.join}.weight"] = torch.eye(2 * hidden)[predictor.embedding * hidden :][:hidden].clone()
    save_file(weights, directory / "predictor.safetensors")
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": [predictor.architecture]}, indent=2))


def _std(name: str, weight: Any) -> float | None:
    """Standard deviation to draw a parameter with, or None to leave it as it is."""
    if "norm" in name:
        return None
    if weight.dim() < 2:
        return 0.1  # biases
    if "embed_tokens" in name:
        return EMBEDDING_STD
    gain = ATTENTION_GAIN if any(part in name for part in ("q_proj", "k_proj", "kv_a_proj")) else BODY_GAIN
    return gain / math.sqrt(weight.shape[1])


def _processor(config: Any, tokenizer: Any) -> Any:
    """What makes placeholders and pixels of images, each of which is one tile."""
    from transformers import Idefics3ImageProcessor, Idefics3Processor

    vision = config.vision_config
    edge = {"longest_edge": vision.image_size}
    images = Idefics3ImageProcessor(size=edge, max_image_size=edge, do_image_splitting=False)
    places = (vision.image_size // vision.patch_size // config.scale_factor) ** 2
    return Idefics3Processor(images, tokenizer, image_seq_len=places, chat_template=CHAT_TEMPLATE)


def _tokenizer(more: Sequence[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|start|>", "<|end|>", *more],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TRAINING_TEXT], trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|start|>", eos_token="<|end|>")
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
