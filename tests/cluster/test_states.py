"""The parts of a state that are planned for are those that a running engine describes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Recurrent
from vllm.v1.kv_cache_interface import MambaSpec

from kvferry.cluster.blueprint import Blocks, blueprint, cache_shape
from kvferry.cluster.spec import Layout
from kvferry.cluster.states import state_parts
from kvferry.errors import SpecError
from kvferry.geometry import LayerShard
from kvferry.vllm.state_view import state_shards

from .configs import GATED_DELTA_NET, GROUPED_QUERY, MAMBA2, SHORT_CONVOLUTION

BOTH = (torch.bfloat16, torch.bfloat16)
CASES = [
    (GATED_DELTA_NET, Recurrent.GDN_ATTN, lambda tp: Shapes.gated_delta_net_state_shape(tp, 12, 24, 8, 4, 4), BOTH),
    (
        *(MAMBA2, Recurrent.MAMBA2, lambda tp: Shapes.mamba2_state_shape(tp, 192, 1, 24, 8, 16, 4)),
        (torch.bfloat16, torch.float32),
    ),
    (SHORT_CONVOLUTION, Recurrent.SHORT_CONV, lambda tp: Shapes.short_conv_state_shape(tp, 96, 3), BOTH[:1]),
]
IDS = ["delta net", "mamba 2", "conv"]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("config", "kind", "shapes", "dtypes"), CASES, ids=IDS)
def test_parts_are_those_of_a_running_engine(config: Any, kind: Any, shapes: Any, dtypes: Any, tp: int) -> None:
    spec = MambaSpec(16, shapes=shapes(tp), dtypes=dtypes, mamba_type=kind)
    cache = torch.zeros((3, 1, 1, spec.page_size_bytes), dtype=torch.int8)
    module = SimpleNamespace(norm=SimpleNamespace(n_groups=1))
    planned = blueprint(cache_shape(config, "bfloat16"), Layout(tp), Blocks(16, 3))
    number = min(cache_shape(config, "bfloat16").recurrent)
    layer = f"model.layers.{number}"
    for worker in planned.workers:
        mine = [shard for shard in worker.shards if shard.layer.startswith(f"{layer}.") and shard.kind == "state"]
        running = list(state_shards(layer, cache, spec, module, worker.tp_rank, tp, group=0))
        assert _parts(mine) == _parts(running)


def _parts(shards: list[LayerShard]) -> list[tuple[Any, ...]]:
    """In the order in which they lie in a page."""
    page = min(shard.address for shard in shards)
    return sorted(
        (shard.address - page, shard.head_stride, shard.layer, shard.heads, shard.total_heads, shard.cell_bytes)
        for shard in shards
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"linear_num_key_heads": 0}, "linear_num_key_heads=0"), ({"linear_conv_kernel_dim": "4"}, "kernel_dim='4'")],
)
def test_a_strange_size_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        state_parts({**GATED_DELTA_NET, **changes}, "bfloat16")


def test_a_model_without_recurrent_layers_has_none() -> None:
    assert state_parts(GROUPED_QUERY, "bfloat16") == ()
