"""Transfer statistics in vLLM's log line and on ``/metrics``, under the names its NIXL connector uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvferry.transport.reader import Outcome

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SECONDS = [0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0]
HISTOGRAMS = {
    "transfer_duration": ("vllm:nixl_xfer_time_seconds", "Time from order to verified end of a load", _SECONDS),
    "post_duration": ("vllm:nixl_post_time_seconds", "Time to prepare and post the reads of a load", _SECONDS),
    "bytes_transferred": ("vllm:nixl_bytes_transferred", "Bytes of a load", [2.0**i for i in range(11, 35, 2)]),
    "num_descriptors": (
        "vllm:nixl_num_descriptors",
        "Descriptors of a load",
        [1, 2, 5, 10, 20, 50, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000],
    ),
}
COUNTERS = {
    "num_failed_transfers": ("vllm:nixl_num_failed_transfers", "Loads that failed or were not vouched for"),
    "num_kv_expired_reqs": ("vllm:nixl_num_kv_expired_reqs", "Prefills whose lease ended before they were loaded"),
    "num_overdue_reads": ("kvferry:num_overdue_reads", "Reads that did not end within read_timeout"),
}
LAYOUT = "layout"
LAYOUT_INFO = "kvferry:layout_info"


class TransferStats(KVConnectorStats):
    """Observations of one interval: a list per name, one entry per load and worker.

    ``LAYOUT`` is not an observation but said once: what the engine's KV cache is compatible with.
    """

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or {})
        for name in (*HISTOGRAMS, *COUNTERS, LAYOUT):
            self.data.setdefault(name, [])

    def record(self, outcome: Outcome) -> None:
        if outcome.failure:
            self.count("num_failed_transfers", 1)
            return
        self.data["transfer_duration"].append(outcome.seconds)
        self.data["post_duration"].append(outcome.post_seconds)
        self.data["bytes_transferred"].append(sum(part.bytes for part in outcome.reads))
        self.data["num_descriptors"].append(sum(part.descriptors for part in outcome.reads))

    def count(self, counter: str, number: int) -> None:
        """Add to one of ``COUNTERS``."""
        self.data[counter] += [1] * number

    def describe(self, compatibility: str) -> None:
        """Say what ``kvferry.geometry.compatibility`` says of the engine."""
        self.data[LAYOUT] = [compatibility]

    def reset(self) -> None:
        self.data: dict[str, Any] = {name: [] for name in (*HISTOGRAMS, *COUNTERS, LAYOUT)}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, values in other.data.items():
            self.data.setdefault(name, []).extend(values)
        return self

    def reduce(self) -> dict[str, int | float]:
        seconds = np.asarray(self.data["transfer_duration"] or [0.0])
        megabytes = sum(self.data["bytes_transferred"]) / 2**20
        return {
            "Num successful transfers": len(self.data["transfer_duration"]),
            "Avg xfer time (ms)": round(float(seconds.mean()) * 1e3, 3),
            "P90 xfer time (ms)": round(float(np.percentile(seconds, 90)) * 1e3, 3),
            "MB transferred": round(megabytes, 3),
            "Avg number of descriptors": round(float(np.mean(self.data["num_descriptors"] or [0])), 1),
            "Num failed transfers": len(self.data["num_failed_transfers"]),
        }

    def is_empty(self) -> bool:
        return not any(self.data.values())


class TransferMetrics(KVConnectorPromMetrics):
    """The same observations as Prometheus histograms and counters, one set per engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        for key, (name, text, buckets) in HISTOGRAMS.items():
            self._metrics[key] = self._histogram_cls(
                name=name, documentation=text, buckets=buckets, labelnames=labelnames
            )
        for key, (name, text) in COUNTERS.items():
            self._metrics[key] = self._counter_cls(name=name, documentation=text, labelnames=labelnames)
        self._layout = self._gauge_cls(
            name=LAYOUT_INFO,
            documentation="Engines with one fingerprint can load from each other",
            labelnames=[*labelnames, "fingerprint"],
            multiprocess_mode="mostrecent",
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for fingerprint in transfer_stats_data.get(LAYOUT, ()):
            self._layout.labels(*labels, fingerprint).set(1)
        for key in (*HISTOGRAMS, *COUNTERS):
            values = transfer_stats_data.get(key, ())
            metric = self._metrics[key].labels(*labels)
            record = metric.inc if key in COUNTERS else metric.observe
            for value in values:
                record(value)
