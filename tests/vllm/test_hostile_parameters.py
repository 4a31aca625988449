"""Decode requests with any parameters at all: computed locally, nothing raises, and valid ones are loaded meanwhile."""

import logging
import socket
import time
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from kvferry.errors import SettingsError
from kvferry.protocol.authentication import SECRET_VARIABLE
from kvferry.vllm import scheduler as module
from kvferry.vllm.scheduler import SchedulerHalf
from kvferry.vllm.settings import Settings

PROMPT = list(range(300))
BLOCKS = ([3, 4, 5],)
DEADLINE_S = 10.0
CLAIM_TIMEOUT_S = 0.3
SECRET = "a secret of enough bytes"
TOKEN = "0123456789abcdef" * 2


def _make_config(role):
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            data_parallel_index=0,
        ),
        kv_transfer_config=SimpleNamespace(
            is_kv_producer=role == "kv_producer",
            is_kv_consumer=role == "kv_consumer",
            engine_id="engine",
            kv_load_failure_policy="recompute",
        ),
    )


@pytest.fixture
def make_half(monkeypatch):
    monkeypatch.setattr(module, "get_ip", lambda: "127.0.0.1")
    halves = []

    def make(role, secret=None, **settings):
        if secret is None:
            monkeypatch.delenv(SECRET_VARIABLE, raising=False)
        else:
            monkeypatch.setenv(SECRET_VARIABLE, secret)
        halves.append(SchedulerHalf(_make_config(role), Settings(claim_timeout=CLAIM_TIMEOUT_S, **settings)))
        return halves[-1]

    yield make
    for half in halves:
        half.shutdown()


@pytest.fixture(autouse=True)
def nothing_raises(caplog):
    """What raises on the side channel's threads is logged."""
    yield
    assert [record.getMessage() for record in caplog.get_records("call") if record.levelno >= logging.ERROR] == []


def _make_request(name, params):
    request = Request(name, list(PROMPT), SamplingParams(max_tokens=1), None)
    request.kv_transfer_params = params  # what this release of vLLM refuses itself, another may let through
    return request


def _prefill(producer, name="p-1"):
    request = _make_request(name, {"do_remote_decode": True})
    request.num_computed_tokens, request.status = 300, RequestStatus.FINISHED_LENGTH_CAPPED
    return producer.request_finished(request, BLOCKS)[1]


def _life(half, params, name="d-1"):
    """All that vLLM calls for a request that is computed locally; returns what it was told could be loaded."""
    request = _make_request(name, params)
    half.on_new_request(request)
    deadline = time.monotonic() + DEADLINE_S
    while (answer := half.get_num_new_matched_tokens(request, 0))[0] is None:
        assert time.monotonic() < deadline, "the request hangs"
    if answer == (0, False):
        half.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([7, 8, 9],)), 0)
        assert half.build_connector_meta(None).loads == []
        request.num_computed_tokens, request.status = 300, RequestStatus.FINISHED_STOPPED
        assert half.request_finished(request, ([7, 8, 9],)) == (False, None)
    return answer


def _deep():
    value = []
    for _ in range(50_000):
        value = [value]
    return value


VALUES = [
    None,
    True,
    -1,
    0,
    1 << 70,
    10**5000,
    0.5,
    float("nan"),
    "",
    "a" * 100_000,
    "\ud800",
    "x\ny",
    [1],
    {"a": [{}]},
]
TOP = ("remote_host", "remote_port", "remote_engine_id", "remote_request_id", "remote_num_tokens", "kvferry")
OWN = ("version", "incarnation", "nonce", "token_hash", "layout", "mac")


@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "secret"])
def test_broken_values_in_any_place_are_computed_locally_and_good_ones_loaded(make_half, secret):
    producer, consumer = make_half("kv_producer", secret), make_half("kv_consumer", secret)
    for number, value in enumerate([*VALUES, _deep()]):
        for key in (*TOP, *OWN):
            params = _prefill(producer, f"p-{number}-{key}")
            place = params if key in TOP else params["kvferry"]
            place[key] = value
            answer = _life(consumer, params, f"d-{number}-{key}")
            # Without a secret nobody can say that what is only said for people was altered.
            if key in ("remote_engine_id", "layout", "mac") or (key, value) == ("version", True):
                assert answer in ((0, False), (300, True))
            else:
                assert answer == (0, False), (key, str(value)[:20])
    assert _life(consumer, _prefill(producer), "d-good") == (300, True)


@pytest.mark.parametrize("value", [*VALUES, _deep()], ids=lambda value: str(type(value).__name__))
def test_engine_ids_that_name_nobody_are_computed_locally(make_half, value):
    assert _life(make_half("kv_consumer"), {"do_remote_prefill": True, "remote_engine_id": value}) == (0, False)


@pytest.mark.parametrize("params", [[], [1], "text", 3, True, 0.5, {}, {"do_remote_prefill": {"a": 1}}], ids=str)
def test_parameters_that_are_no_parameters_are_computed_locally(make_half, params):
    consumer, producer = make_half("kv_consumer"), make_half("kv_producer")
    assert _life(consumer, params) == (0, False)
    assert _life(producer, params) == (0, False)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(TOP), JSON), st.none() | st.dictionaries(st.sampled_from(OWN), JSON))
def test_arbitrary_json_is_computed_locally(consumer, top, own):
    given = {} if own is None else {"kvferry": {"version": 1, **own}}
    params = {"do_remote_prefill": True, **given, **top}
    assert _life(consumer, params) == (0, False)


@pytest.fixture
def consumer(make_half):
    return make_half("kv_consumer")


def test_a_host_that_never_answers_costs_the_claim_timeout(make_half):
    producer, consumer = make_half("kv_producer"), make_half("kv_consumer")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        params = {**_prefill(producer), "remote_port": silent.getsockname()[1]}
        began = time.monotonic()
        assert _life(consumer, params) == (0, False)
        assert time.monotonic() - began < CLAIM_TIMEOUT_S + 1.0


@pytest.mark.parametrize(
    ("consumers_secret", "producers_secret"),
    [(SECRET, None), (SECRET, SECRET + "!")],
    ids=["unsigned", "another secret"],
)
def test_an_address_that_is_not_signed_is_never_dialled(make_half, consumers_secret, producers_secret):
    """Neither to claim, nor to release what was offered for another prompt."""
    producer, consumer = make_half("kv_producer", producers_secret), make_half("kv_consumer", consumers_secret)
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(0.2)
        params = {**_prefill(producer), "remote_port": trap.getsockname()[1]}
        assert _life(consumer, params) == (0, False)
        params["kvferry"]["token_hash"] = TOKEN
        assert _life(consumer, params, "d-2") == (0, False)
        with pytest.raises(TimeoutError):
            trap.accept()


@pytest.mark.parametrize("key", ["remote_port", "remote_num_tokens", "token_hash", "nonce"])
def test_altered_parameters_are_never_dialled_with_a_secret(make_half, key):
    producer, consumer = make_half("kv_producer", SECRET), make_half("kv_consumer", SECRET)
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(0.2)
        changed = {"remote_port": trap.getsockname()[1], "remote_num_tokens": 299}.get(key, TOKEN)
        params = _prefill(producer)
        (params if key in params else params["kvferry"])[key] = changed
        assert _life(consumer, params) == (0, False)
        with pytest.raises(TimeoutError):
            trap.accept()


def test_without_a_secret_a_name_is_refused_with_one_warning_that_says_what_to_set(make_half, caplog):
    producer, consumer = make_half("kv_producer"), make_half("kv_consumer")
    for number in range(3):
        params = {**_prefill(producer), "remote_host": "prefill.example.com"}
        assert _life(consumer, params, f"d-{number}") == (0, False)
    warnings = [record.getMessage() for record in caplog.records if "prefilled here" in record.getMessage()]
    assert sum(record.levelname == "WARNING" and "prefilled" in record.getMessage() for record in caplog.records) == 1
    assert "KVFERRY_SECRET" in warnings[0]


def test_signed_parameters_are_loaded(make_half):
    producer, consumer = make_half("kv_producer", SECRET), make_half("kv_consumer", SECRET)
    assert _life(consumer, _prefill(producer)) == (300, True)


def test_replayed_parameters_are_computed_locally(make_half):
    producer, consumer, other = (make_half(f"kv_{role}", SECRET) for role in ("producer", "consumer", "consumer"))
    params = _prefill(producer)
    assert _life(consumer, params) == (300, True)
    assert _life(other, params) == (0, False)


def test_a_start_without_a_secret_is_said_once_and_says_what_to_set(make_half, caplog):
    make_half("kv_consumer")
    assert caplog.text.count("without a secret") == 1
    assert "KVFERRY_SECRET" in caplog.text
    make_half("kv_consumer", SECRET)
    assert caplog.text.count("without a secret") == 1
    assert SECRET not in caplog.text


def test_a_secret_that_is_none_stops_the_start(make_half):
    with pytest.raises(SettingsError, match="KVFERRY_SECRET holds a secret of 5 bytes"):
        make_half("kv_producer", "short")
