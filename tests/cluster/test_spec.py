"""Layouts as people write them, and what a model allows."""

import contextlib
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cluster.spec import Layout, check_layout, kv_bytes_per_token, layout_reasons, read_model_config
from kvferry.errors import SpecError

GROUPED_QUERY = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 4, "hidden_size": 256}
LATENT = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_hidden_layers": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}

sizes = st.integers(1, 64)


@given(st.builds(Layout, *[sizes] * 3, pcp=sizes, dcp=sizes, interleave=sizes))
def test_a_layout_reads_back_what_it_prints(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_a_partition_reads_back_what_it_prints(stages: list[int]) -> None:
    layout = Layout(pp=len(stages), partition=tuple(stages))
    assert Layout.parse(str(layout)) == layout


@given(st.text(max_size=30))
def test_any_text_is_a_layout_or_a_clear_error(text: str) -> None:
    with contextlib.suppress(SpecError):
        Layout.parse(text)


def test_what_is_not_named_is_one() -> None:
    assert Layout.parse("pp=3") == Layout(tp=1, pp=3, dp=1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not of the form key=value"),
        ("two", "not of the form key=value"),
        ("tpp=2", "did you mean tp?"),
        ("TP=2", "did you mean tp?"),
        ("tensor=2", "did you mean tp?"),
        ("tp=8,dcpp=2", "did you mean dcp?"),
        ("decode_context_parallel_size=2", "did you mean dcp?"),
        ("-pcp=2", "did you mean pcp?"),
        ("dcp-kv-cache-interleave-size=16", "did you mean interleave?"),
        ("tp=2,dcp=0", "positive whole number"),
        ("interleave=99999", "between 1 and 65536"),
        ("tp=2,tp=2", "given twice"),
        ("tp=0", "positive whole number"),
        ("tp=-1", "positive whole number"),
        ("tp=1.5", "positive whole number"),
        ("tp=²", "positive whole number"),
        ("tp=2048", "between 1 and 1024"),
        ("tp=" + "9" * 5000, "far too large"),
        ("pp=2,partition=1+2+1", "names 3 pipeline stages, but pp=2"),
        ("pp=2,partition=4+0", "positive whole number"),
    ],
)
def test_an_unusable_layout_says_why(text: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        Layout.parse(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("tp=1", "tp1"),
        ("dp=2", "dp2"),
        ("tp=2,pp=2", "tp2pp2"),
        ("pp=3,partition=1+2+1", "pp3-121"),
        ("tp=8,dcp=4,interleave=16", "tp8dcp4interleave16"),
    ],
)
def test_the_label_leaves_out_what_is_one(text: str, label: str) -> None:
    assert Layout.parse(text).label == label


def test_ranks_of_prefill_context_parallelism_are_workers_and_those_of_decode_are_not() -> None:
    layout = Layout(tp=4, pp=2, dp=3, pcp=2, dcp=8)
    assert (layout.ranks, layout.core_workers, layout.workers) == (8, 16, 48)


@pytest.mark.parametrize(
    "layout",
    ["tp=1", "tp=2", "tp=4", "tp=8", "pp=4", "pp=3,partition=1+2+1", "dp=16", "tp=8,dcp=4", "tp=4,dcp=2", "pcp=3"],
)
def test_layouts_that_vllm_takes_fit(layout: str) -> None:
    check_layout(Layout.parse(layout), GROUPED_QUERY)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("tp=3", "8 attention heads cannot be split over tp=3"),
        ("pp=5", "4 layers are too few for pp=5"),
        ("pp=2,partition=1+2", "the partition adds up to 3 layers, the model has 4"),
        ("tp=8,dcp=3", "dcp=3 does not divide tp=8"),
        ("tp=4,pcp=2,dcp=4", "dcp=4 is not one of 1, 2, 8, as pcp=2 asks for"),
        ("tp=2,dcp=2", "tp=2 has none of 2"),
        ("tp=8,dcp=8", "dcp=8 is more than the 4 ranks of tp=8 that have the same of 2 KV heads"),
        ("tp=8,dcp=8", "4 attention heads of a KV head cannot be split over dcp=8"),
    ],
)
def test_a_model_that_cannot_be_split_says_why(layout: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        check_layout(Layout.parse(layout), GROUPED_QUERY)


def test_every_reason_is_given_at_once() -> None:
    with pytest.raises(SpecError, match=r"heads.*; .*layers"):
        check_layout(Layout(tp=3, pp=5), GROUPED_QUERY)


def test_kv_heads_neither_split_nor_repeated_are_refused() -> None:
    with pytest.raises(SpecError, match="6 KV heads cannot be split over, or repeated on, tp=4"):
        check_layout(Layout(tp=4), {**GROUPED_QUERY, "num_attention_heads": 12, "num_key_value_heads": 6})


@pytest.mark.parametrize("latent", [False, True])
def test_context_parallel_sizes_are_refused_where_vllm_refuses_them(latent: bool) -> None:
    """What is said of a layout before anything is started is what vLLM says of it when it starts."""
    heads = {"num_attention_heads": 24, "num_key_value_heads": 2, **({"kv_lora_rank": 32} if latent else {})}
    sizes = itertools.product((1, 2, 4, 6, 8, 12), (1, 2, 3), (1, 2, 3, 4, 6, 8, 12, 24))
    for layout in (Layout(tp=tp, pcp=pcp, dcp=dcp) for tp, pcp, dcp in sizes):
        reasons = layout_reasons(layout, heads)
        assert bool(reasons) == _vllm_refuses(layout, latent), (layout, reasons)


def _vllm_refuses(layout: Layout, latent: bool) -> bool:
    from vllm.config import ModelConfig, ParallelConfig

    try:
        parallel = ParallelConfig(
            tensor_parallel_size=layout.tp,
            prefill_context_parallel_size=layout.pcp,
            decode_context_parallel_size=layout.dcp,
            distributed_executor_backend="mp",
        )
        model = SimpleNamespace(
            model_arch_config=SimpleNamespace(total_num_attention_heads=24),
            use_mla=latent,
            get_total_num_kv_heads=lambda: 2,
            multimodal_config=None,
        )
        ModelConfig.verify_with_parallel_config(model, parallel)
    except ValueError:
        return True
    return False


def test_a_latent_cache_is_on_every_rank() -> None:
    check_layout(Layout(tp=8), LATENT)


def test_bytes_per_token_count_keys_and_values_of_all_layers() -> None:
    assert kv_bytes_per_token(GROUPED_QUERY, "float32") == 4 * 2 * 2 * 32 * 4
    assert kv_bytes_per_token(LATENT, "bfloat16") == 4 * 576 * 2


def test_the_text_part_of_a_multimodal_config_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": GROUPED_QUERY}))
    assert read_model_config(tmp_path) == GROUPED_QUERY


@pytest.mark.parametrize(("content", "said"), [("{", "cannot be read"), ("[]", "cannot be read"), (None, "no config")])
def test_an_unreadable_model_says_why(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(SpecError, match=said):
        read_model_config(tmp_path)


def test_a_missing_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="there is no model directory"):
        read_model_config(tmp_path / "nowhere")
