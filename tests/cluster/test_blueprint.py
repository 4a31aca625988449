"""Engines made from a configuration hold what engines that run would hold."""

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from kvferry.cluster.blueprint import Blocks, blueprint, cache_shape, stages, unmovable
from kvferry.cluster.spec import Layout, kv_bytes_per_token
from kvferry.errors import SpecError
from kvferry.geometry import Span, check

from .configs import DEEPSEEK_V3, FEW_HEADS, GATED_DELTA_NET, GROUPED_QUERY, LATENT, LLAMA_405B

BLOCKS = Blocks(tokens=16, count=9)


@pytest.mark.parametrize("config", [GROUPED_QUERY, LATENT, FEW_HEADS, LLAMA_405B, DEEPSEEK_V3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_cells_add_up_to_the_bytes_of_a_token(config: dict[str, Any], dtype: str) -> None:
    assert cache_shape(config, dtype).bytes_per_token == kv_bytes_per_token(config, dtype)


@pytest.mark.parametrize(
    ("layers", "pp", "sizes"), [(4, 3, [1, 2, 1]), (5, 3, [2, 2, 1]), (8, 4, [2, 2, 2, 2]), (126, 4, [31, 32, 32, 31])]
)
def test_layers_are_spread_as_vllm_spreads_them(layers: int, pp: int, sizes: list[int]) -> None:
    assert [held.size for held in stages(layers, Layout(pp=pp))] == sizes


def test_a_partition_is_taken_as_given() -> None:
    assert stages(4, Layout(pp=3, partition=(1, 2, 1))) == (Span(0, 1), Span(1, 3), Span(3, 4))


@pytest.mark.parametrize("config", [GROUPED_QUERY, LATENT])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=3, pp=2), Layout(tp=24, pp=5)])
def test_every_head_of_every_layer_is_held_and_can_be_read(config: dict[str, Any], layout: Layout) -> None:
    """More ranks than heads hold replicas, each head by as many ranks."""
    shape = cache_shape(config, "bfloat16")
    engine = blueprint(shape, layout, BLOCKS)
    held = Counter(
        (shard.layer, head) for worker in engine.workers for shard in worker.shards for head in range(*shard.heads)
    )
    assert len(held) == shape.layers * shape.heads
    assert set(held.values()) == {max(1, layout.tp // shape.heads)}
    assert not check(engine, blueprint(shape, Layout(), BLOCKS))


def test_layers_of_a_worker_do_not_touch() -> None:
    """Ranges of different layers never merge, as they do not in vLLM's tensors."""
    (worker,) = blueprint(cache_shape(LLAMA_405B, "float32"), Layout(), BLOCKS).workers
    ends = [shard.extent for shard in worker.shards]
    assert all(earlier.stop < later.start for earlier, later in pairwise(ends))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": "big"}, "hidden_size='big' is not a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 is not a whole number from 1"),
        ({"num_key_value_heads": -1}, "num_key_value_heads=-1"),
        ({"intermediate_size": [1, 2]}, "intermediate_size="),
        ({"num_hidden_layers": True}, "num_hidden_layers=True"),
        ({"hidden_size": 4, "head_dim": None}, "a head has no size"),
    ],
)
def test_a_configuration_with_a_strange_size_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        cache_shape({**GROUPED_QUERY, **changes}, "bfloat16")


def test_a_configuration_without_sizes_is_refused() -> None:
    with pytest.raises(SpecError, match="has no num_hidden_layers"):
        cache_shape({}, "bfloat16")


def test_layers_that_keep_something_unknown_are_named() -> None:
    config = {**GROUPED_QUERY, "layer_types": ["linear_attention", "full_attention", "wave", "sliding_attention"]}
    assert unmovable(config) == [
        "config.json does not say in known terms what linear_attention layers keep of a request",
        "config.json does not say in known terms what wave layers keep of a request",
    ]
    assert not unmovable(GROUPED_QUERY)
    assert not unmovable(GATED_DELTA_NET)
