"""A drafter of EAGLE's kind with random weights: one layer more, whose guesses are as good as none."""

import json
import math
from pathlib import Path

from kvferry.cluster.cache import cached
from kvferry.cluster.tiny import tiny

VERSION, SEED = 1, 1


def eagle(kind: str) -> Path:
    """The directory of a drafter for a tiny model of Llama's shape, made the first time."""
    base = tiny(kind)
    return cached(f"{base.name}-eagle-{VERSION}", lambda directory: _build(base, directory))


def _build(base: Path, directory: Path) -> None:
    import torch
    from safetensors.torch import save_file

    config = {**json.loads((base / "config.json").read_text()), "num_hidden_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query, key = (config[heads] * config["head_dim"] for heads in ("num_attention_heads", "num_key_value_heads"))
    shapes = {
        "fc": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj": (query, hidden),
        "layers.0.self_attn.k_proj": (key, hidden),
        "layers.0.self_attn.v_proj": (key, hidden),
        "layers.0.self_attn.o_proj": (hidden, query),
        "layers.0.mlp.gate_proj": (inner, hidden),
        "layers.0.mlp.up_proj": (inner, hidden),
        "layers.0.mlp.down_proj": (hidden, inner),
    }
    source = torch.Generator().manual_seed(SEED)
    weights = {
        f"{name}.weight": torch.randn(shape, generator=source) / math.sqrt(shape[1]) for name, shape in shapes.items()
    }
    save_file(
        {**weights, "layers.0.post_attention_layernorm.weight": torch.ones(hidden)}, directory / "model.safetensors"
    )
