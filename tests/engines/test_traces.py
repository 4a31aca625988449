"""Real engines that trace export the spans of a load, in the trace of its request."""

import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from kvferry.cluster.dispatch import Sampling

from .conftest import Fleet, Instance, Key
from .waiting import await_that

pytestmark = [pytest.mark.engines, pytest.mark.heavy, pytest.mark.timeout(600)]

SPANS = {"kvferry.claim", "kvferry.connect", "kvferry.read", "kvferry.ack"}


@pytest.fixture(scope="module")
def pair(fleet: Fleet) -> tuple[Instance, Instance]:
    producer, consumer = fleet.instances(
        Key("qwen2", "tp=1", "kv_producer", variant="traced"), Key("qwen2", "pp=2", "kv_consumer", variant="traced")
    )
    return producer, consumer


@pytest.fixture
def collected(pair: tuple[Instance, Instance]) -> Iterator[list[Span]]:
    """The spans that come to where the consumer sends its own."""
    spans: list[Span] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            request = ExportTraceServiceRequest.FromString(body)
            spans.extend(span for one in request.resource_spans for scope in one.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Nothing, where the base class prints every request."""

    extra = pair[1].spec.extra
    endpoint = urlsplit(extra[extra.index("--otlp-traces-endpoint") + 1])
    with ThreadingHTTPServer((endpoint.hostname, endpoint.port), Collector) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield spans
        server.shutdown()
        thread.join(10)


def test_a_load_is_in_its_requests_trace(fleet: Fleet, pair: tuple[Instance, Instance], collected: list[Span]) -> None:
    producer, consumer = pair
    prompt = list(range(10, 310))
    params = fleet.dispatcher.prefill(producer.url, prompt, uuid.uuid4().hex).kv_transfer_params
    trace, parent = uuid.uuid4(), uuid.uuid4().bytes[:8]
    body = {**Sampling().body("model", prompt), "kv_transfer_params": params}
    headers = {"traceparent": f"00-{trace.hex}-{parent.hex()}-01"}
    answer = httpx.post(f"{consumer.url}/v1/completions", json=body, headers=headers, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text

    def traced() -> list[Span]:
        return [span for span in collected if span.trace_id == trace.bytes]

    await_that(lambda: len(traced()) == 1 + 1 + 2 * 3, 30, "vLLM's span, a claim, and three of each of two workers")
    assert {span.parent_span_id for span in traced()} == {parent}
    [theirs] = [span for span in traced() if span.name == "llm_request"]
    ours = [span for span in traced() if span is not theirs]
    assert {span.name for span in ours} == SPANS
    told = [{one.key: one.value.string_value for one in span.attributes} for span in ours]
    assert {one["kvferry.producer.layout"] for one in told} == {"tp1pp1dp0"}
    assert {one.get("kvferry.worker") for one in told} == {None, "pp0tp0", "pp1tp0"}
    assert all(theirs.start_time_unix_nano <= span.start_time_unix_nano for span in ours)
    assert all(span.end_time_unix_nano <= theirs.end_time_unix_nano for span in ours)
