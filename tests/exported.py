"""Which metrics the code exports, for what is held against it."""

import inspect
import re
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import patch

import prometheus_client

from kvferry.gateway import metrics as gateway
from kvferry.vllm.metrics import METRICS

_VLLM = re.compile(r'self\._(counter|gauge|histogram)_cls\(\s*name="(vllm:\w+)"')


@dataclass(frozen=True)
class Exported:
    """A metric as ``/metrics`` names it; a counter with its ``_total``, a histogram without suffix."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str
    values: tuple[str, ...] = ()

    @property
    def series(self) -> set[str]:
        """Names under which a query finds it."""
        if self.kind == "histogram":
            return {f"{self.name}_{suffix}" for suffix in ("bucket", "sum", "count")}
        return {self.name}


def of_the_connector() -> list[Exported]:
    """Each has vLLM's labels besides, `engine` and `model_name`."""
    return [
        Exported(
            metric.name + "_total" * (metric.kind is prometheus_client.Counter),
            metric.kind.__name__.lower(),
            (metric.label,) if metric.label else (),
            metric.text,
            metric.values,
        )
        for metric in METRICS.values()
    ]


def of_the_gateway() -> list[Exported]:
    made: list[Exported] = []

    def noting(cls):
        def make(name, text, labels, prefix, **more):
            suffix = "_total" if cls is prometheus_client.Counter else ""
            made.append(Exported(f"{prefix}_{name}{suffix}", cls.__name__.lower(), tuple(labels), text))
            return cls(name, text, labels, prefix, **more)

        return make

    with (
        patch.object(gateway, "Counter", noting(prometheus_client.Counter)),
        patch.object(gateway, "Histogram", noting(prometheus_client.Histogram)),
    ):
        metrics = gateway.Metrics(SimpleNamespace(instances={}))
    gauges = [Exported(one.name, "gauge", one._labelnames, one.documentation) for one in metrics.collect()]
    return [*made, *gauges]


def of_vllm() -> list[Exported]:
    """Read from its source: to make them takes an engine."""
    from vllm.v1.metrics import loggers

    found = _VLLM.findall(inspect.getsource(loggers))
    return [Exported(name + "_total" * (kind == "counter"), kind, (), "") for kind, name in found]
