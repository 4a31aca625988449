"""What the connector counts and measures, on ``/metrics`` and in vLLM's log line.

``METRICS`` is the whole list. Transfers have the names of vLLM's own NIXL connector, so that its dashboards work; what
is this connector's alone begins with ``kvferry:``.

The way of an observation: either half adds it to its ``Tally``, from any thread. vLLM takes the tally of every worker
and of the scheduler half in each step, adds them up and hands them to one of its API servers, where ``TransferMetrics``
turns them into Prometheus' and ``TransferStats.reduce`` into the figures of the log line.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvferry.protocol.messages import Request
from kvferry.transport.reader import Outcome

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_SHORT_SECONDS = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_LEASE_SECONDS = (0.1, 0.5, 1, 2, 5, 10, 15, 20, 25, 30, 60, 120, 300)
_NUMBERS = (1, 2, 5, 10, 20, 50, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000)

_FAILED_CLAIMS = ("gone", "late", "unreachable", "invalid")
_PHASES = ("claim", "connect", "follow", "read", "ack", "stage")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, as it is exported.

    Attributes:
        kind: ``Counter`` (to whose name ``_total`` is added), ``Gauge`` or ``Histogram``.
        label: its one label beside those of vLLM.
        values: all that the label can be; empty where that is no fixed set.
        buckets: of a histogram.
    """

    name: str
    kind: type[Counter] | type[Gauge] | type[Histogram]
    text: str
    label: str = ""
    values: tuple[str, ...] = ()
    buckets: Sequence[float] = ()


METRICS = {
    "transfer_duration": Metric(
        "vllm:nixl_xfer_time_seconds", Histogram, "Time from order to verified end of a load", buckets=_SECONDS
    ),
    "post_duration": Metric(
        "vllm:nixl_post_time_seconds", Histogram, "Time to prepare and post the reads of a load", buckets=_SECONDS
    ),
    "bytes_transferred": Metric(
        "vllm:nixl_bytes_transferred", Histogram, "Bytes of a load", buckets=[2.0**i for i in range(11, 35, 2)]
    ),
    "num_descriptors": Metric("vllm:nixl_num_descriptors", Histogram, "Descriptors of a load", buckets=_NUMBERS),
    "num_failed_transfers": Metric(
        "vllm:nixl_num_failed_transfers", Counter, "Loads that failed or were not vouched for"
    ),
    "num_kv_expired_reqs": Metric(
        "vllm:nixl_num_kv_expired_reqs", Counter, "Prefills whose lease ended before they were loaded"
    ),
    "overdue_reads": Metric("kvferry:num_overdue_reads", Counter, "Reads that did not end within read_timeout"),
    "claims": Metric(
        "kvferry:claims", Counter, "Claims, by what the producer answered", "outcome", ("granted", *_FAILED_CLAIMS)
    ),
    "recomputed": Metric(
        "kvferry:recomputed",
        Counter,
        "Decode requests that were offered a KV cache and prefill it here, by why",
        "reason",
        ("parameters", "prompt", *_FAILED_CLAIMS, "lost", "failed"),
    ),
    "gone": Metric(
        "kvferry:gone",
        Counter,
        "Messages about grants that this producer does not hold (any more)",
        "message",
        tuple(message.__name__.lower() for message in get_args(Request)),
    ),
    "held_blocks": Metric("kvferry:held_blocks", Gauge, "KV cache blocks in grants; of two grants counted twice"),
    "lease_left": Metric(
        "kvferry:lease_left_seconds",
        Histogram,
        "Left of a lease when the last acknowledgement or the release came",
        buckets=_LEASE_SECONDS,
    ),
    "first_contact": Metric(
        "kvferry:first_contact_seconds",
        Histogram,
        "From a worker's first word to a producer's incarnation to its connection",
        buckets=_SHORT_SECONDS,
    ),
    "layers_left_out": Metric(
        "kvferry:layers_left_out", Counter, "Layers of a drafter that a producer does not have, by first contact"
    ),
    "phase": Metric(
        "kvferry:phase_seconds", Histogram, "Time of each phase of a load", "phase", _PHASES, _SHORT_SECONDS
    ),
    "layout": Metric(
        "kvferry:layout_info", Gauge, "Engines with one fingerprint can load from each other", "fingerprint"
    ),
    "side_channel": Metric(
        "kvferry:side_channel_info", Gauge, "Where claims are answered: incarnation@host:port", "at"
    ),
}


class TransferStats(KVConnectorStats):
    """Observations of one interval, by key of ``METRICS`` and value of the label (empty without one): the sum of a
    counter, the last value of a gauge, all values of a histogram. What was not observed is not there."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or {})

    def add(self, key: str, value: float = 1, label: str = "") -> None:
        """Observe ``value`` of the metric ``METRICS[key]``."""
        series = self.data.setdefault(key, {})
        kind = METRICS[key].kind
        if kind is Histogram:
            series.setdefault(label, []).append(value)
        else:
            series[label] = value + (series.get(label, 0) if kind is Counter else 0)

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for key, series in other.data.items():
            for label, value in series.items():
                for one in value if METRICS[key].kind is Histogram else [value]:
                    self.add(key, one, label)
        return self

    def is_empty(self) -> bool:
        return not self.data

    def reduce(self) -> dict[str, int | float]:
        """The figures of vLLM's log line; what did not happen is not among them."""
        figures = {
            "Avg xfer time (ms)": _milliseconds(np.mean, self._values("transfer_duration")),
            "P90 xfer time (ms)": _milliseconds(_p90, self._values("transfer_duration")),
            "MB transferred": round(sum(self._values("bytes_transferred")) / 2**20, 3),
            "Avg number of descriptors": round(float(np.mean(self._values("num_descriptors") or [0])), 1),
            "Num failed transfers": self._sum("num_failed_transfers"),
            "Num KV expired reqs": self._sum("num_kv_expired_reqs"),
            "Num overdue reads": self._sum("overdue_reads"),
            "Claims": self._sum("claims"),
            "P90 claim time (ms)": _milliseconds(_p90, self._values("phase", "claim")),
            "Recomputed": self._sum("recomputed"),
            "Gone": self._sum("gone"),
            "Held blocks": self._sum("held_blocks"),
            "Min lease left (s)": round(min(self._values("lease_left"), default=0), 1),
            "First contacts": len(self._values("first_contact")),
        }
        happened = {name: value for name, value in figures.items() if value}
        return {"Num successful transfers": len(self._values("transfer_duration")), **happened}

    def _values(self, key: str, label: str = "") -> list[float]:
        return self.data.get(key, {}).get(label, [])  # type: ignore[no-any-return]

    def _sum(self, key: str) -> int:
        return int(sum(self.data.get(key, {}).values()))


def _p90(values: list[float]) -> float:
    return float(np.percentile(values, 90))


def _milliseconds(reduce: Any, values: list[float]) -> float:
    return round(float(reduce(values)) * 1e3, 3) if values else 0.0


class Tally:
    """What one half has observed since vLLM last took it. Any thread may add; an empty one costs a step nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = TransferStats()

    def add(self, key: str, value: float = 1, label: str = "") -> None:
        """See ``TransferStats.add``."""
        with self._lock:
            self._stats.add(key, value, label)

    def record(self, outcome: Outcome) -> None:
        """The end of a load on this worker."""
        if outcome.failure:
            self.add("num_failed_transfers")
            return
        self.add("transfer_duration", outcome.seconds)
        self.add("post_duration", outcome.post_seconds)
        self.add("bytes_transferred", sum(part.bytes for part in outcome.reads))
        self.add("num_descriptors", sum(part.descriptors for part in outcome.reads))
        for phase, seconds in outcome.phases.items():
            self.add("phase", seconds, phase)

    def take(self) -> TransferStats | None:
        """Everything since the last call, None when nothing happened."""
        if self._stats.is_empty():
            return None
        with self._lock:
            stats, self._stats = self._stats, TransferStats()
        return stats


class TransferMetrics(KVConnectorPromMetrics):
    """``METRICS`` as Prometheus', one set per engine. What can be counted is 0 from the start."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {key: self._make(metric, metric_types[metric.kind]) for key, metric in METRICS.items()}
        for key, metric in METRICS.items():
            for engine in per_engine_labelvalues.values():
                for value in metric.values if metric.label else ("",):
                    self._child(key, engine, value)

    def _make(self, metric: Metric, cls: Any) -> Any:
        more: dict[str, Any] = {}
        if metric.kind is Histogram:
            more["buckets"] = metric.buckets
        if metric.kind is Gauge:
            # vLLM hands the statistics of a step to any one of its API servers.
            more["multiprocess_mode"] = "mostrecent"
        labels = [*self._labelnames, metric.label] if metric.label else self._labelnames
        return cls(name=metric.name, documentation=metric.text, labelnames=labels, **more)

    def _child(self, key: str, engine: list[object], value: str) -> Any:
        return self._metrics[key].labels(*engine, *([value] if METRICS[key].label else []))

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        for key, series in transfer_stats_data.items():
            for label, value in series.items():
                child, kind = self._child(key, engine, label), METRICS[key].kind
                if kind is Counter:
                    child.inc(value)
                elif kind is Gauge:
                    child.set(value)
                else:
                    for one in value:
                        child.observe(one)
