"""The layers that a planned pipeline stage holds are those that vLLM gives it."""

import pytest

from kvferry.cluster.blueprint import stages
from kvferry.cluster.spec import Layout

utils = pytest.importorskip("vllm.distributed.utils")


def test_stages_are_those_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)
    for pp in range(1, 17):
        for layers in range(pp, 4 * pp + 1):
            ours = [tuple(held) for held in stages(layers, Layout(pp=pp))]
            assert ours == [utils.get_pp_indices(layers, rank, pp) for rank in range(pp)]
