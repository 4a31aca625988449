"""Which number a worker has, and what it says of a producer that lacks layers."""

import logging
from types import SimpleNamespace

from kvferry.vllm import worker as module
from kvferry.vllm.metrics import Tally
from kvferry.vllm.settings import Settings
from kvferry.vllm.worker import WorkerHalf


def _met(left):
    half = object.__new__(WorkerHalf)
    half._tally = Tally()
    half._met(0.1, SimpleNamespace(label="tp2pp1dp0"), left)
    return half._tally.take().data


def test_what_a_producer_does_not_have_is_said_and_counted(caplog):
    with caplog.at_level(logging.WARNING, "kvferry.vllm.worker"):
        data = _met([f"draft_model.layers.{i}" for i in range(5)])
    assert sum(data["layers_left_out"].values()) == 5
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("5 layers of the drafter are not loaded from tp2pp1dp0")
    assert "draft_model.layers.2, ..." in line


def test_a_producer_that_has_all_is_met_without_a_word(caplog):
    assert "layers_left_out" not in _met([])
    assert not caplog.records


def test_ranks_of_prefill_context_parallelism_are_numbered_through(monkeypatch):
    """As in vLLM's handshake; each is a reader of its own, under a name that no other has."""
    names = set()
    for pcp in range(2):
        for tp in range(3):
            groups = {"pp": (1, 2), "pcp": (pcp, 2), "tp": (tp, 3)}
            for group, (rank, size) in groups.items():
                made = SimpleNamespace(rank_in_group=rank, world_size=size)
                monkeypatch.setattr(module, f"get_{group}_group", lambda made=made: made)
            half = WorkerHalf(SimpleNamespace(), Settings(), None)
            names.add((half._pp_rank, half._tp_rank))
    assert names == {(1, number) for number in range(6)}
