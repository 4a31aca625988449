"""Model configurations for tests of what is planned from them; sizes as published."""

from typing import Any

GROUPED_QUERY: dict[str, Any] = {
    "num_hidden_layers": 5,
    "num_attention_heads": 24,
    "num_key_value_heads": 12,
    "hidden_size": 96,
    "intermediate_size": 192,
    "vocab_size": 384,
}
LATENT: dict[str, Any] = {**GROUPED_QUERY, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "v_head_dim": 4}
FEW_HEADS: dict[str, Any] = {**GROUPED_QUERY, "num_attention_heads": 8, "num_key_value_heads": 2}
LLAMA_405B: dict[str, Any] = {
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "vocab_size": 128256,
}
DEEPSEEK_V3: dict[str, Any] = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "quantization_config": {"quant_method": "fp8"},
}
MIXTRAL_8X7B: dict[str, Any] = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "vocab_size": 32000,
}
QWEN2_05B: dict[str, Any] = {
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
_FULL, _LINEAR = "full_attention", "linear_attention"
GATED_DELTA_NET: dict[str, Any] = {
    **GROUPED_QUERY,
    "layer_types": [_LINEAR, _LINEAR, _FULL, _LINEAR, _FULL],
    "linear_num_key_heads": 12,
    "linear_num_value_heads": 24,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 4,
}
MAMBA2: dict[str, Any] = {
    **GROUPED_QUERY,
    "layer_types": [_FULL, "mamba", "mamba", _FULL, "mamba"],
    "mamba_n_heads": 24,
    "mamba_d_head": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_ssm_cache_dtype": "float32",
}
SHORT_CONVOLUTION: dict[str, Any] = {
    **GROUPED_QUERY,
    "layer_types": ["conv", _FULL, "conv", "conv", _FULL],
    "conv_L_cache": 3,
    "conv_dim": 96,
}
