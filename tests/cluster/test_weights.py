"""The estimate of weights comes near the published parameter counts, and is cut over ranks as vLLM cuts."""

from typing import Any

import pytest

from kvferry.cluster.blueprint import stages
from kvferry.cluster.spec import Layout
from kvferry.cluster.weights import weight_bytes

from .configs import DEEPSEEK_V3, LLAMA_405B, MIXTRAL_8X7B, QWEN2_05B


def _weights(config: dict[str, Any], layout: Layout, dtype: str = "bfloat16") -> tuple[int, ...]:
    return weight_bytes(config, layout, stages(config["num_hidden_layers"], layout), dtype)


def test_experts_are_cut_over_ranks_of_prefill_context_parallelism_too() -> None:
    assert _weights(MIXTRAL_8X7B, Layout(tp=2, pcp=4)) == _weights(MIXTRAL_8X7B, Layout(tp=2, dp=4))
    assert _weights(LLAMA_405B, Layout(tp=2, pcp=4)) == _weights(LLAMA_405B, Layout(tp=2))


@pytest.mark.parametrize(
    ("config", "parameters", "element_bytes"),
    [
        (LLAMA_405B, 405.85e9, 2),
        (DEEPSEEK_V3, 671.0e9, 1),
        (MIXTRAL_8X7B, 46.70e9, 2),
        (QWEN2_05B, 0.494e9, 2),
    ],
    ids=["llama-405b", "deepseek-v3", "mixtral-8x7b", "qwen2-0.5b"],
)
def test_one_rank_holds_the_published_parameters(
    config: dict[str, Any], parameters: float, element_bytes: float
) -> None:
    assert sum(_weights(config, Layout())) == pytest.approx(parameters * element_bytes, rel=0.01)


def test_tensor_parallel_ranks_share_dense_weights() -> None:
    """All but the norms is cut, as long as there are KV heads for all ranks."""
    (whole,), (part,) = _weights(LLAMA_405B, Layout()), _weights(LLAMA_405B, Layout(tp=8))
    assert part == pytest.approx(whole / 8, rel=1e-3)


def test_stages_share_layers_and_keep_the_embeddings_at_the_ends() -> None:
    first, middle, last = _weights(LLAMA_405B, Layout(pp=3))
    embedding = 128256 * 16384 * 2
    assert first == middle + embedding
    assert last == pytest.approx(middle + embedding, abs=16384 * 2)


def test_tied_embeddings_are_stored_once_on_one_stage_and_twice_on_two() -> None:
    both = sum(_weights(QWEN2_05B, Layout(pp=2)))
    assert both - sum(_weights(QWEN2_05B, Layout())) == 151936 * 896 * 2


def test_experts_are_cut_over_data_parallel_ranks_too() -> None:
    (one,), (two,) = _weights(MIXTRAL_8X7B, Layout()), _weights(MIXTRAL_8X7B, Layout(dp=2))
    assert one - two == 32 * 3 * 4096 * 14336 * 8 // 2 * 2


def test_bits_of_quantised_layers_are_counted() -> None:
    quantised = {**LLAMA_405B, "quantization_config": {"quant_method": "awq", "bits": 4}}
    assert sum(_weights(quantised, Layout())) < 0.27 * sum(_weights(LLAMA_405B, Layout()))
    unknown = {**LLAMA_405B, "quantization_config": {"quant_method": "new"}}
    assert _weights(unknown, Layout()) == _weights(LLAMA_405B, Layout())


def test_listed_and_stepped_dense_layers_have_no_experts() -> None:
    all_sparse = sum(_weights(MIXTRAL_8X7B, Layout()))
    for changes in ({"mlp_only_layers": list(range(0, 32, 2))}, {"decoder_sparse_step": 2}):
        half = sum(_weights({**MIXTRAL_8X7B, **changes}, Layout()))
        assert all_sparse - half == 16 * (7 * 3 * 4096 * 14336 + 4096 * 8) * 2
