"""What the gateway counts, for Prometheus."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from kvferry.gateway.health import Fleet
from kvferry.gateway.settings import MULTIPROCESS_VARIABLE

PREFIX = "kvferry_gateway"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics(Collector):
    """One set per application. With several worker processes any of them tells the sum of all."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Callable[..., Counter]:
            # Children are looked up by every request; the cache does that without a lock and a list.
            return cache(Counter(name, text, labels, PREFIX, registry=registry).labels)

        def seconds(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(f"{name}_seconds", text, labels, PREFIX, registry=registry, buckets=_SECONDS)

        self.requests = counter("requests", "Requests answered, by the status sent", "path", "status")
        self.broken = counter("broken_streams", "Streams that ended with an error after their first byte", "path")
        self.left = counter("clients_gone", "Requests whose client went away", "path")
        self.legs = counter("legs", "Legs sent, by what the instance answered", "leg", "instance", "status")
        self.retries = counter("retries", "Legs sent again", "leg")
        self.plain = counter("plain_decodes", "Requests that decode prefilled itself", "reason")
        self.releases = counter("releases", "Prefilled prompts given back", "outcome")
        self.prefill = seconds("prefill", "From sending a prefill leg to its answer")
        self.first = cache(seconds("first_byte", "From a request's arrival to its answer's first byte", "path").labels)
        self.whole = cache(seconds("request", "From a request's arrival to its answer's end", "path").labels)
        registry.register(self)

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """The fleet as this process sees it."""
        ranks = [rank for instance in self._fleet.instances.values() for rank in instance.ranks]
        for name, text, value in (
            ("usable", "Whether a rank is given work", lambda rank: float(rank.usable)),
            ("outstanding_requests", "Under way at a rank", lambda rank: rank.requests),
            ("outstanding_tokens", "Estimated, under way", lambda rank: rank.tokens),
        ):
            gauge = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=("role", "instance", "rank"))
            for rank in ranks:
                gauge.add_metric((rank.instance.spec.role.value, rank.instance.spec.url, str(rank.index)), value(rank))
            yield gauge

    def text(self) -> bytes:
        if MULTIPROCESS_VARIABLE not in os.environ:
            return generate_latest(self._registry)
        together = CollectorRegistry()
        MultiProcessCollector(together)
        return generate_latest(together)
