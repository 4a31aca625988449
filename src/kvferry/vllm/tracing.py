"""OpenTelemetry spans of a load, in the trace of its request.

vLLM gives a request its trace headers only where tracing is on (``--otlp-traces-endpoint``), and sets up the exporter
of each of its processes. Without headers nothing here is called, and OpenTelemetry is not imported.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from kvferry.protocol.subject import Subject

logger = logging.getLogger(__name__)

Headers = Mapping[str, str]
"""``traceparent`` and perhaps ``tracestate``, as they came with the request."""


def spans(
    headers: Headers, subject: Subject, phases: Mapping[str, float], failure: str | None, **attributes: str | int
) -> None:
    """Tell of phases that followed each other, the last of which ends now; never raises.

    Args:
        headers: name the span that these are children of.
        phases: seconds of each.
        failure: why the last phase ended badly.
        attributes: more of them, ``kvferry.`` before each name.
    """
    try:
        _emit(headers, phases, failure, {**_attributes(subject), **{f"kvferry.{k}": v for k, v in attributes.items()}})
    except Exception:
        logger.exception("the spans of %s could not be made", subject)


def _emit(
    headers: Headers, phases: Mapping[str, float], failure: str | None, attributes: Mapping[str, str | int]
) -> None:
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    tracer = trace.get_tracer("kvferry")
    parent = TraceContextTextMapPropagator().extract(headers)
    end, last = time.time_ns(), len(phases) - 1
    begin = end - round(sum(phases.values()) * 1e9)
    for index, (phase, seconds) in enumerate(phases.items()):
        stop = end if index == last else begin + round(seconds * 1e9)
        span = tracer.start_span(
            f"kvferry.{phase}", parent, trace.SpanKind.CLIENT, attributes=attributes, start_time=begin
        )
        if failure and index == last:
            span.set_status(trace.StatusCode.ERROR, failure)
        span.end(stop)
        begin = stop


def _attributes(subject: Subject) -> dict[str, str | int]:
    told: dict[str, str | int] = {"gen_ai.request.id": subject.request, "kvferry.consumer.layout": subject.here}
    if subject.peer is not None:
        host, port = subject.peer.address
        told |= {
            "server.address": host,
            "server.port": port,
            "kvferry.producer.incarnation": subject.peer.incarnation,
            "kvferry.producer.layout": subject.peer.layout,
        }
    return told
