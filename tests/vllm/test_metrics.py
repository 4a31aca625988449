"""Transfer statistics: aggregation over workers and their Prometheus form."""

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvferry.geometry import WorkerShards
from kvferry.protocol.loads import Order
from kvferry.transport.reader import Outcome, PartRead
from kvferry.vllm.metrics import COUNTERS, HISTOGRAMS, TransferMetrics, TransferStats

ORDER = Order("d-1", "p-1", ("127.0.0.1", 1), "1" * 32, "2" * 32, [[1]], [[2]], 0, 128)
WORKER = WorkerShards(0, 0, ())


def _make_stats(*outcomes):
    stats = TransferStats()
    for outcome in outcomes:
        stats.record(outcome)
    return stats


DONE = Outcome(ORDER, None, 0.2, 0.01, None, (PartRead(WORKER, 1 << 20, 3), PartRead(WORKER, 1 << 20, 4)))
FAILED = Outcome(ORDER, "gone", 0.1)


def test_a_load_counts_all_it_read():
    stats = _make_stats(DONE)
    assert stats.data["bytes_transferred"] == [2 << 20]
    assert stats.data["num_descriptors"] == [7]


def test_a_failed_load_counts_as_a_failure_only():
    stats = _make_stats(FAILED)
    assert not stats.is_empty()
    assert stats.data["num_failed_transfers"] == [1]
    assert stats.data["transfer_duration"] == []


def test_workers_add_up():
    total = _make_stats(DONE).aggregate(_make_stats(DONE, FAILED))
    assert total.reduce()["Num successful transfers"] == 2
    assert total.reduce()["MB transferred"] == pytest.approx(4)
    assert total.reduce()["Num failed transfers"] == 1


def test_nothing_recorded_is_empty_and_can_be_reduced():
    assert TransferStats().is_empty()
    assert TransferStats().reduce()["Num successful transfers"] == 0


def test_statistics_survive_the_way_to_the_api_server():
    assert TransferStats(_make_stats(DONE).to_dict()).reduce() == _make_stats(DONE).reduce()


def test_metrics_carry_the_names_of_vllms_nixl_connector():
    text = _exported(_make_stats(DONE, FAILED))
    assert 'vllm:nixl_bytes_transferred_sum{engine="1"} 2.097152e+06' in text
    assert 'vllm:nixl_num_failed_transfers_total{engine="1"} 1.0' in text
    for name, *_ in (*HISTOGRAMS.values(), *COUNTERS.values()):
        assert name in text


def test_metrics_tell_which_engines_can_load_from_each_other():
    stats = TransferStats()
    stats.describe("c0ffee")
    assert not stats.is_empty()
    text = _exported(TransferStats(stats.to_dict()))
    assert 'kvferry:layout_info{engine="1",fingerprint="c0ffee"} 1.0' in text


def _exported(stats):
    """The text of ``/metrics`` once the second of two engines has reported."""
    registry = CollectorRegistry()

    def bound(cls):
        return lambda **kwargs: cls(registry=registry, **kwargs)

    class Config:
        kv_transfer_config = None

    types = {Gauge: bound(Gauge), Counter: bound(Counter), Histogram: bound(Histogram)}
    metrics = TransferMetrics(Config(), types, ["engine"], {0: ["0"], 1: ["1"]})
    metrics.observe(stats.data, engine_idx=1)
    return generate_latest(registry).decode()
