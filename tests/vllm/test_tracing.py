"""Spans of a load: in the trace of its request, below its caller's span, and none at all without a trace."""

import queue
import threading
import time
from types import SimpleNamespace

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from kvferry.protocol.loads import Order
from kvferry.protocol.subject import Subject
from kvferry.transport.reader import Outcome
from kvferry.vllm import scheduler, tracing, worker
from kvferry.vllm.metadata import StepMetadata
from kvferry.vllm.settings import Settings

TRACE_ID, PARENT_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
HEADERS = {"traceparent": f"00-{TRACE_ID:032x}-{PARENT_ID:016x}-01", "tracestate": "vendor=1"}
ORDER = Order("d-1", "p-1", ("127.0.0.1", 5600), "1" * 32, "2" * 32, [[1]], [[2]], 0, 128, "tp2pp2dp0")
PROMPT = list(range(300))
DEADLINE_S = 10.0


@pytest.fixture
def exported(monkeypatch):
    """Keeps the spans that have ended, in their order."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


def _expect(exporter, number):
    deadline = time.monotonic() + DEADLINE_S
    while len(exporter.get_finished_spans()) < number:
        assert time.monotonic() < deadline, [span.name for span in exporter.get_finished_spans()]
    return exporter.get_finished_spans()


def _assert_in_the_trace(spans):
    for span in spans:
        assert (span.context.trace_id, span.parent.span_id, span.kind) == (TRACE_ID, PARENT_ID, SpanKind.CLIENT)
        assert span.context.trace_state.get("vendor") == "1"


def _emit(phases, failure=None, headers=HEADERS):
    tracing.spans(headers, Subject("d-1", "tp1pp1dp0", ORDER), phases, failure, worker="pp0tp0")


def test_phases_follow_each_other_and_end_now(exported):
    before = time.time_ns()
    _emit({"connect": 0.25, "read": 0.5, "ack": 0.25})
    connect, read, ack = spans = _expect(exported, 3)
    assert [span.name for span in spans] == ["kvferry.connect", "kvferry.read", "kvferry.ack"]
    _assert_in_the_trace(spans)
    assert before <= ack.end_time <= time.time_ns()
    assert (connect.end_time, read.end_time) == (read.start_time, ack.start_time)
    assert ack.end_time - connect.start_time == 1_000_000_000
    assert read.end_time - read.start_time == 500_000_000


def test_a_span_says_which_load_it_is_of(exported):
    _emit({"read": 0.1})
    [span] = _expect(exported, 1)
    assert dict(span.attributes) == {
        "gen_ai.request.id": "d-1",
        "server.address": "127.0.0.1",
        "server.port": 5600,
        "kvferry.producer.incarnation": "1" * 32,
        "kvferry.producer.layout": "tp2pp2dp0",
        "kvferry.consumer.layout": "tp1pp1dp0",
        "kvferry.worker": "pp0tp0",
    }


def test_a_failure_is_the_last_phases(exported):
    _emit({"connect": 0.1, "ack": 0.1}, "gone")
    connect, ack = _expect(exported, 2)
    assert connect.status.status_code is StatusCode.UNSET
    assert (ack.status.status_code, ack.status.description) == (StatusCode.ERROR, "gone")


def test_a_request_that_its_caller_does_not_sample_has_no_spans(exported):
    _emit({"read": 0.1}, headers={"traceparent": HEADERS["traceparent"][:-2] + "00"})
    assert exported.get_finished_spans() == ()


def test_headers_that_are_no_trace_cost_no_load(exported):
    _emit({"read": 0.1}, headers={"traceparent": "nonsense"})
    [span] = _expect(exported, 1)
    assert span.parent is None


def test_what_the_exporter_does_wrong_ends_nothing(monkeypatch, caplog):
    monkeypatch.setattr(trace, "get_tracer", lambda name: 1 / 0)
    _emit({"read": 0.1})
    assert "the spans of request d-1" in caplog.text


@pytest.fixture
def halves(monkeypatch):
    monkeypatch.setattr(scheduler, "get_ip", lambda: "127.0.0.1")
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            data_parallel_index=0,
        ),
        kv_transfer_config=SimpleNamespace(
            is_kv_producer=True, is_kv_consumer=True, engine_id="engine", kv_load_failure_policy="fail"
        ),
    )
    made = [scheduler.SchedulerHalf(config, Settings()) for _ in range(2)]
    yield made
    for half in made:
        half.shutdown()


def _claimed(halves, headers):
    """A decode request whose claim was granted and whose blocks are there; the metadata of the step after it."""
    producer, consumer = halves
    prefill = Request(
        "p-1", PROMPT, SamplingParams(extra_args={"kv_transfer_params": {"do_remote_decode": True}}), None
    )
    prefill.num_computed_tokens, prefill.status = len(PROMPT), RequestStatus.FINISHED_LENGTH_CAPPED
    _, params = producer.request_finished(prefill, ([3, 4, 5],))
    sampling = SamplingParams(extra_args={"kv_transfer_params": params})
    decode = Request("d-1", PROMPT, sampling, None, trace_headers=headers)
    consumer.on_new_request(decode)
    deadline = time.monotonic() + DEADLINE_S
    while (tokens := consumer.get_num_new_matched_tokens(decode, 0)[0]) is None:
        assert time.monotonic() < deadline
    consumer.update_state_after_alloc(decode, SimpleNamespace(get_block_ids=lambda: ([7, 8, 9],)), tokens)
    return consumer.build_connector_meta(None)


def test_a_claim_is_in_its_requests_trace_and_the_workers_get_the_headers(halves, exported):
    metadata = _claimed(halves, HEADERS)
    [span] = _expect(exported, 1)
    assert span.name == "kvferry.claim"
    assert span.attributes["gen_ai.request.id"] == "d-1"
    _assert_in_the_trace([span])
    assert metadata.traces == {"d-1": HEADERS}
    assert halves[1].build_connector_meta(None).traces == {}


def test_without_a_trace_nothing_is_said_nor_passed_on(halves, exported):
    assert _claimed(halves, None).traces == {}
    assert exported.get_finished_spans() == ()


class _StandInReader:
    """Ends every order on a thread of its own."""

    def __init__(self, half):
        self.half, self.overdue = half, 0

    def submit(self, order):
        outcome = Outcome(order, None, 0.3, phases={"connect": 0.1, "read": 0.1, "ack": 0.1})
        thread = threading.Thread(target=self.half._ended, args=[outcome])
        thread.start()
        thread.join(DEADLINE_S)


@pytest.fixture
def worker_half():
    half = object.__new__(worker.WorkerHalf)
    half._outcomes, half._traces, half._released = queue.SimpleQueue(), {}, set()
    half._here, half._name, half._reader = "tp1pp1dp0", "pp0tp0", _StandInReader(half)
    return half


def test_a_worker_tells_of_reading_and_acknowledging_in_the_requests_trace(worker_half, exported):
    worker_half.start_load_kv(StepMetadata([ORDER], traces={"d-1": HEADERS}))
    spans = _expect(exported, 3)
    assert [span.name for span in spans] == ["kvferry.connect", "kvferry.read", "kvferry.ack"]
    _assert_in_the_trace(spans)
    assert {span.attributes["kvferry.worker"] for span in spans} == {"pp0tp0"}
    assert worker_half._traces == {}
    assert worker_half._outcomes.get_nowait().order is ORDER


def test_a_worker_tells_of_nothing_without_a_trace(worker_half, exported):
    worker_half.start_load_kv(StepMetadata([ORDER]))
    assert worker_half._outcomes.get_nowait().order is ORDER
    assert exported.get_finished_spans() == ()
