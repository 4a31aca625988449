"""Shards against the tensors that vLLM's own layout code makes: every cell must be where the shard says."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvferry.errors import UnsupportedError
from kvferry.geometry import Span
from kvferry.vllm.cache_view import shards_of

LAYERS = ["model.layers.3.self_attn.attn", "model.layers.4.self_attn.attn"]
BLOCKS, BLOCK_TOKENS = 5, 8


def _make_config(tp_size=1, total_heads=4, backend="FLASH_ATTN", isa=None):
    module = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend))
    if isa:
        module.isa = isa
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=tp_size),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: total_heads),
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(LAYERS, module)),
    )


def _attention(heads=4):
    return FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=heads, head_size=16, dtype=torch.float16)


def _latent():
    return MLAAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=24, dtype=torch.bfloat16, max_tp_shards=1
    )


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
