"""Shards against the tensors that vLLM's own layout code makes: every cell must be where the shard says."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvferry.errors import UnsupportedError
from kvferry.geometry import ALL_TOKENS, Span, TokenShare
from kvferry.vllm.cache_view import shards_by_layer

LAYERS = ["model.layers.3.self_attn.attn", "model.layers.4.self_attn.attn"]
BLOCKS, BLOCK_TOKENS = 5, 8


def shards_of(*arguments, **more):
    """Of all layers."""
    return tuple(shard for shards in shards_by_layer(*arguments, **more).values() for shard in shards)


def _make_config(tp_size=1, total_heads=4, backend="FLASH_ATTN", isa=None, dcp_size=1, interleave=1):
    module = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend))
    if isa:
        module.isa = isa
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp_size, decode_context_parallel_size=dcp_size, cp_kv_cache_interleave_size=interleave
        ),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: total_heads),
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(LAYERS, module)),
    )


def _attention(heads=4):
    return FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=heads, head_size=16, dtype=torch.float16)


def _latent():
    return MLAAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=24, dtype=torch.bfloat16)


def _state():
    return MambaSpec(BLOCK_TOKENS, shapes=((3, 24), (2, 4, 4)), dtypes=(torch.float16, torch.float32))


def _make_caches(spec, layout=KVCacheLayout.LBHNC, kernel_block_size=None):
    layer_stride, block_stride, *_ = compute_layout_strides(spec, BLOCKS, len(LAYERS), layout)
    size = spec.page_size_bytes * BLOCKS * len(LAYERS)
    tensor = KVCacheTensor(size, LAYERS, layer_stride, block_stride)
    raw = torch.zeros(size, dtype=torch.int8)
    views = create_kv_cache_views(raw, spec, BLOCKS, layout, tensor, kernel_block_size)
    config = KVCacheConfig(BLOCKS, [tensor], [KVCacheGroupSpec(LAYERS, spec)])
    return dict(zip(LAYERS, views, strict=True)), config


def _assert_cells_are_where_the_shard_says(shard, view):
    for block in range(view.shape[0]):
        for head in range(view.shape[1]):
            for token in range(view.shape[2]):
                said = (
                    shard.address + block * shard.block_stride + head * shard.head_stride + token * shard.token_stride
                )
                assert said == view[block, head, token].data_ptr()
    assert shard.cell_bytes == view.shape[3] * view.element_size()


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
@pytest.mark.parametrize("spec", [_attention(), _latent()], ids=["attention", "latent"])
def test_every_cell_is_where_the_shard_says_in_every_layout(layout, spec):
    caches, kv_cache_config = _make_caches(spec, layout)
    for shard in shards_of(caches, kv_cache_config, _make_config(), tp_rank=0):
        _assert_cells_are_where_the_shard_says(shard, caches[shard.layer])


def test_kernel_blocks_that_subdivide_a_block_are_counted():
    caches, kv_cache_config = _make_caches(_attention(), kernel_block_size=4)
    for shard in shards_of(caches, kv_cache_config, _make_config(), tp_rank=0):
        assert (shard.split, shard.block_tokens, shard.num_blocks) == (2, 4, 2 * BLOCKS)
        assert (shard.manager_blocks, shard.manager_block_tokens) == (BLOCKS, BLOCK_TOKENS)
        _assert_cells_are_where_the_shard_says(shard, caches[shard.layer])


@pytest.mark.parametrize(
    ("tp_size", "tp_rank", "total", "held", "heads"),
    [(1, 0, 4, 4, Span(0, 4)), (2, 1, 4, 2, Span(2, 4)), (4, 2, 4, 1, Span(2, 3)), (4, 3, 2, 1, Span(1, 2))],
)
def test_a_rank_says_which_global_heads_it_holds(tp_size, tp_rank, total, held, heads):
    caches, kv_cache_config = _make_caches(_attention(held))
    for shard in shards_of(caches, kv_cache_config, _make_config(tp_size, total), tp_rank):
        assert (shard.heads, shard.total_heads) == (heads, min(total, max(tp_size, held * tp_size)))


def test_every_rank_holds_the_whole_latent_cache():
    caches, kv_cache_config = _make_caches(_latent())
    for tp_rank in range(4):
        for shard in shards_of(caches, kv_cache_config, _make_config(4, 8), tp_rank):
            assert (shard.kind, shard.heads, shard.total_heads) == ("latent", Span(0, 1), 1)


CONTEXT_PARALLEL = pytest.mark.skipif(
    "dcp_sharded" not in MLAAttentionSpec.__dataclass_fields__, reason="refused before vLLM 0.31"
)


@CONTEXT_PARALLEL
@pytest.mark.parametrize(
    ("spec", "heads", "total"),
    [(_latent(), Span(0, 1), 1), (_attention(1), Span(1, 2), 2)],
    ids=["latent", "attention"],
)
def test_a_context_parallel_rank_says_which_tokens_it_holds(spec, heads, total):
    caches, kv_cache_config = _make_caches(spec)
    config = _make_config(4, 2, dcp_size=2, interleave=4)
    for shard in shards_of(caches, kv_cache_config, config, tp_rank=3, dcp_rank=1):
        assert (shard.heads, shard.total_heads, shard.share) == (heads, total, TokenShare(2, 1, 4))
        assert shard.manager_block_tokens == 2 * BLOCK_TOKENS


@CONTEXT_PARALLEL
@pytest.mark.parametrize(
    ("spec", "change"),
    [(_latent(), {"dcp_sharded": False}), (_state(), {"mamba_type": MambaAttentionBackendEnum.GDN_ATTN})],
    ids=["a drafter's", "state"],
)
def test_a_cache_that_context_parallelism_leaves_whole_is_whole(spec, change):
    caches, kv_cache_config = _make_caches(replace(spec, **change))
    config = _make_config(2, dcp_size=2, interleave=4)
    for shard in shards_of(caches, kv_cache_config, config, tp_rank=0, dcp_rank=1):
        assert (shard.share, shard.manager_block_tokens) == (ALL_TOKENS, BLOCK_TOKENS)


def test_without_context_parallelism_the_interleave_means_nothing():
    caches, kv_cache_config = _make_caches(_latent())
    for shard in shards_of(caches, kv_cache_config, _make_config(interleave=7), 0):
        assert shard.share == ALL_TOKENS


@CONTEXT_PARALLEL
def test_an_interleave_that_does_not_divide_the_block_is_refused():
    caches, kv_cache_config = _make_caches(_latent())
    with pytest.raises(UnsupportedError, match=f"fill blocks of {BLOCK_TOKENS} tokens 3 at a time"):
        shards_of(caches, kv_cache_config, _make_config(2, dcp_size=2, interleave=3), 0)


def test_a_backend_that_packs_blocks_is_opaque_and_names_its_instruction_set():
    caches, kv_cache_config = _make_caches(_attention())
    for shard in shards_of(caches, kv_cache_config, _make_config(backend="CPU_ATTN", isa="amx"), tp_rank=0):
        assert (shard.packing, shard.opaque) == ("CPU_ATTN/amx", True)


def test_a_backend_nobody_has_looked_at_is_opaque():
    caches, kv_cache_config = _make_caches(_attention())
    assert all(shard.opaque for shard in shards_of(caches, kv_cache_config, _make_config(backend="NEW_ATTN"), 0))


def test_a_layer_that_shares_anothers_cache_is_not_described_twice():
    caches, kv_cache_config = _make_caches(_attention())
    caches["model.layers.9.self_attn.attn"] = caches[LAYERS[0]]
    assert [shard.layer for shard in shards_of(caches, kv_cache_config, _make_config(), 0)] == LAYERS


def test_a_spec_without_a_tensor_is_refused_by_layer():
    caches, kv_cache_config = _make_caches(_attention())
    del caches[LAYERS[1]]
    with pytest.raises(UnsupportedError, match=LAYERS[1]):
        shards_of(caches, kv_cache_config, _make_config(), 0)


def test_a_tensor_that_is_not_what_its_spec_says_is_refused_with_its_shape():
    caches, kv_cache_config = _make_caches(_attention())
    caches[LAYERS[0]] = caches[LAYERS[0]][:, :3]
    with pytest.raises(UnsupportedError, match=r"\(5, 3, 8, 32\)"):
        shards_of(caches, kv_cache_config, _make_config(), 0)


def test_a_kind_of_cache_that_is_not_moved_yet_is_refused_by_name():
    caches, kv_cache_config = _make_caches(_attention())
    caches[LAYERS[0]] = torch.zeros(7)
    with pytest.raises(UnsupportedError, match="cannot move a FullAttentionSpec cache"):
        shards_of(caches, kv_cache_config, _make_config(), 0)


@pytest.mark.parametrize(
    "layer",
    [
        "draft_model.model.layers.0.self_attn.attn",
        "mtp.layers.0.self_attn.attn",
        "model.mtp.layers.0.self_attn.attn",
        "model.layers.4.self_attn.attn",
    ],
)
def test_layers_of_a_drafter_are_told_by_their_module_or_number(layer):
    caches, kv_cache_config = _make_caches(_attention())
    caches[layer] = caches.pop(LAYERS[1])
    kv_cache_config = replace(kv_cache_config, kv_cache_groups=[KVCacheGroupSpec([LAYERS[0], layer], _attention())])
    config = _make_config()
    config.speculative_config = object()
    config.model_config.get_total_num_hidden_layers = lambda: 4
    config.compilation_config.static_forward_context[layer] = config.compilation_config.static_forward_context[
        LAYERS[1]
    ]
    shards = shards_of(caches, kv_cache_config, config, 0)
    assert [shard.draft for shard in shards] == [False, True]


def test_without_a_drafter_no_layer_is_its():
    caches, kv_cache_config = _make_caches(_attention())
    assert not any(shard.draft for shard in shards_of(caches, kv_cache_config, _make_config(), 0))


def test_every_layer_that_cannot_be_moved_is_named_at_once():
    caches, kv_cache_config = _make_caches(_attention())
    with pytest.raises(UnsupportedError) as refused:
        shards_of({layer: torch.zeros(7) for layer in caches}, kv_cache_config, _make_config(), 0)
    assert all(layer in str(refused.value) for layer in LAYERS)


def _refused(spec, match, layout=KVCacheLayout.LBHNC, backend="FLASH_ATTN"):
    caches, kv_cache_config = _make_caches(spec, layout)
    with pytest.raises(UnsupportedError, match=match):
        shards_of(caches, kv_cache_config, _make_config(backend=backend), 0)


def test_a_packing_that_is_not_contiguous_in_a_head_is_refused():
    _refused(_attention(), "set VLLM_KV_CACHE_LAYOUT=HND", KVCacheLayout.LBNHC, "NEW_ATTN")


@pytest.mark.parametrize("kind", [CrossAttentionSpec, SinkFullAttentionSpec], ids=lambda kind: kind.__name__)
def test_a_spec_nobody_has_looked_at_is_refused(kind):
    spec = kind(block_size=BLOCK_TOKENS, num_kv_heads=4, head_size=16, dtype=torch.float16)
    _refused(spec, f"cannot move a {kind.__name__} cache")


@pytest.mark.parametrize("change", [{"tokens_per_state": 4}, {"num_head_slots": 2, "state_content_bytes": 64}], ids=str)
def test_cells_that_are_not_one_of_a_head_and_a_token_are_refused(change):
    _refused(replace(_attention(), **change), "cannot move a FullAttentionSpec")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"mamba_type": MambaAttentionBackendEnum.LINEAR}, "2 states of LINEAR"),
        ({"shapes": ((3, 8),) * 3, "dtypes": (torch.float16,) * 3}, "3 states of MAMBA2"),
    ],
)
def test_recurrent_layers_that_are_not_known_are_refused(change, match):
    _refused(replace(_state(), **change), match)


def test_a_quantisation_that_packs_tokens_together_is_opaque():
    spec = replace(_attention(), kv_quant_mode=KVQuantMode.TURBOQUANT_4BIT_NC)
    caches, kv_cache_config = _make_caches(spec)
    for shard in shards_of(caches, kv_cache_config, _make_config(), 0):
        assert (shard.opaque, shard.packing) == (True, "FLASH_ATTN/TURBOQUANT_4BIT_NC")
