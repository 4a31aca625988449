"""What the connector observes: its way through vLLM to Prometheus and to the log line."""

import pickle
import threading
import time
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.config import CacheConfig, KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec
from vllm.v1.metrics.loggers import PrometheusStatLogger

from kvferry.gateway.health import Report
from kvferry.geometry import WorkerShards
from kvferry.protocol.loads import Order
from kvferry.transport.reader import Outcome, PartRead
from kvferry.vllm.metrics import METRICS, Tally, TransferMetrics, TransferStats
from kvferry.vllm.plugin import register

ORDER = Order("d-1", "p-1", ("127.0.0.1", 1), "1" * 32, "2" * 32, [[1]], [[2]], 0, 128)
WORKER = WorkerShards(0, 0, ())
PHASES = {"connect": 0.01, "read": 0.18, "ack": 0.01}
DONE = Outcome(ORDER, None, 0.2, 0.01, None, (PartRead(WORKER, 1 << 20, 3), PartRead(WORKER, 1 << 20, 4)), PHASES)
FAILED = Outcome(ORDER, "gone", 0.1, phases={"connect": 0.1})


def _make_stats(*outcomes):
    tally = Tally()
    for outcome in outcomes:
        tally.record(outcome)
    return tally.take() or TransferStats()


def _all():
    """An observation of every metric with every value of its label."""
    stats = TransferStats()
    for key, metric in METRICS.items():
        for value in metric.values or ("x" if metric.label else "",):
            stats.add(key, 2, value)
    return stats


def test_a_load_counts_all_it_read():
    stats = _make_stats(DONE)
    assert stats.data["bytes_transferred"] == {"": [2 << 20]}
    assert stats.data["num_descriptors"] == {"": [7]}
    assert stats.data["phase"] == {"connect": [0.01], "read": [0.18], "ack": [0.01]}


def test_a_failed_load_counts_as_a_failure_only():
    assert _make_stats(FAILED).data == {"num_failed_transfers": {"": 1}}


def test_workers_add_up():
    total = _make_stats(DONE).aggregate(_make_stats(DONE, FAILED))
    assert total.reduce()["Num successful transfers"] == 2
    assert total.reduce()["MB transferred"] == pytest.approx(4)
    assert total.reduce()["Num failed transfers"] == 1


def test_of_a_gauge_the_last_value_counts():
    earlier, later = TransferStats(), TransferStats()
    earlier.add("held_blocks", 7)
    later.add("held_blocks", 0)
    assert earlier.aggregate(later).data == {"held_blocks": {"": 0}}


def test_adding_up_leaves_the_other_one_alone():
    first, second = _make_stats(DONE), _make_stats(DONE)
    TransferStats().aggregate(first).aggregate(second)
    assert first.data == second.data == _make_stats(DONE).data


def test_nothing_recorded_is_empty_and_can_be_reduced():
    assert TransferStats().is_empty()
    assert TransferStats().reduce() == {"Num successful transfers": 0}


def test_the_log_line_says_what_happened_and_nothing_else():
    stats = _make_stats(DONE)
    stats.add("claims", 1, "granted")
    stats.add("claims", 2, "gone")
    stats.add("lease_left", 12.34)
    figures = stats.reduce()
    assert (figures["Claims"], figures["Min lease left (s)"]) == (3, 12.3)
    assert {"Recomputed", "Num failed transfers", "Held blocks"}.isdisjoint(figures)


def test_every_figure_of_the_log_line_can_be_made():
    assert all(value > 0 for value in _all().reduce().values())


def test_vllm_prints_one_line_for_an_interval_and_none_for_a_layout_alone():
    register()
    logging, lines = KVConnectorLogging(KVTransferConfig(kv_connector="KVFerryConnector", kv_role="kv_both")), []
    quiet, busy = TransferStats(), _make_stats(DONE)
    quiet.add("layout", 1, "c0ffee")
    for stats in (quiet, busy, _make_stats(DONE)):
        logging.observe(stats.to_dict())
        if stats is not busy:
            logging.log(lambda *parts: lines.append(parts[0] % parts[1:]))
    [line] = lines
    assert line.startswith("KV Transfer metrics: Num successful transfers=2, Avg xfer time (ms)=200.0, ")
    assert "c0ffee" not in line


def test_statistics_survive_the_way_to_the_api_server():
    """From worker to engine core by pickle, from there to the API server by msgpack."""
    sent = pickle.loads(pickle.dumps(_all()))
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(sent.to_dict()))
    assert TransferStats(data).reduce() == _all().reduce()
    assert _exported(TransferStats(data)) == _exported(_all())


def test_statistics_pass_through_multi_connector():
    ours = MultiKVConnectorStats({"KVFerryConnector": _make_stats(DONE)})
    ours.aggregate(MultiKVConnectorStats({"KVFerryConnector": _make_stats(DONE, FAILED)}))
    assert TransferStats(ours.to_dict()["KVFerryConnector"]).reduce()["Num successful transfers"] == 2


def test_metrics_carry_the_names_of_vllms_nixl_connector():
    text = _exported(_make_stats(DONE, FAILED))
    assert 'vllm:nixl_bytes_transferred_sum{engine="1"} 2.097152e+06' in text
    assert 'vllm:nixl_num_failed_transfers_total{engine="1"} 1.0' in text
    assert all(metric.name in text for metric in METRICS.values())


def test_metrics_tell_which_engines_can_load_from_each_other():
    stats = TransferStats()
    stats.add("layout", 1, "c0ffee")
    assert not stats.is_empty()
    assert 'kvferry:layout_info{engine="1",fingerprint="c0ffee"} 1.0' in _exported(stats)


def test_counters_start_at_zero_with_every_label():
    text = _exported(TransferStats())
    for engine in "01":
        for reason in METRICS["recomputed"].values:
            assert f'kvferry:recomputed_total{{engine="{engine}",reason="{reason}"}} 0.0' in text
    assert "layout_info{" not in text


def test_labels_are_few_and_known():
    """What an unknown value would do: a series that nobody reads, and of client's values without bound."""
    for metric in METRICS.values():
        assert metric.name.startswith(("kvferry:", "vllm:nixl_"))
        assert len(metric.values) < 10
        assert bool(metric.label) == bool(metric.values) or metric.name.endswith("_info")


def test_an_empty_tally_has_nothing_and_a_taken_one_starts_anew():
    tally = Tally()
    assert tally.take() is None
    tally.add("claims", label="granted")
    assert tally.take().data == {"claims": {"granted": 1}}
    assert tally.take() is None


def test_a_tally_loses_nothing_that_threads_add_while_it_is_taken():
    tally, taken = Tally(), TransferStats()
    threads = [threading.Thread(target=lambda: [tally.add("gone", label="claim") for _ in range(2000)]) for _ in "abcd"]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        taken.aggregate(tally.take() or TransferStats())
    taken.aggregate(tally.take() or TransferStats())
    assert taken.data == {"gone": {"claim": 8000}}


def test_a_step_in_which_nothing_happened_costs_a_microsecond():
    tally, steps = Tally(), 20_000
    began = time.process_time()
    for _ in range(steps):
        tally.take()
    assert (time.process_time() - began) / steps < 5e-6


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
    return "\n".join(line for line in generate_latest(registry).decode().splitlines() if "_created" not in line)


@pytest.mark.parametrize("dcp", [1, 4])
def test_the_gateway_reads_what_a_rank_holds_from_vllms_own_words(dcp):
    """Two data parallel ranks of 100 blocks of 16 tokens each, on each of their context parallel ranks."""
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=640),
        parallel_config=SimpleNamespace(decode_context_parallel_size=dcp, prefill_context_parallel_size=1),
    )
    cache = CacheConfig(block_size=16)
    cache.num_gpu_blocks = 2 * 100
    cache.kv_cache_size_tokens, _ = get_kv_cache_capacity(
        config, KVCacheConfig(100, [], [KVCacheGroupSpec(["model.layers.0.self_attn.attn"], spec)])
    )
    registry = CollectorRegistry()
    frontend = SimpleNamespace(_gauge_cls=partial(Gauge, registry=registry), engine_indexes=[0, 1])
    PrometheusStatLogger.log_metrics_info(frontend, "cache_config", cache)
    assert Report.parse(generate_latest(registry)).capacity == 100 * 16 * dcp
