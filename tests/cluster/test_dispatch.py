"""The two legs, as vllm-router sends them."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from kvferry.cluster.dispatch import PREFILL_PARAMETERS, Dispatcher
from kvferry.errors import DispatchError

PREFILL, DECODE = "http://127.0.0.1:1", "http://127.0.0.1:2"
PARAMETERS = {"do_remote_prefill": True, "remote_host": "h", "nested": {"nonce": 2**63, "list": [None, 1.5]}}


def _reply(**more: Any) -> dict[str, Any]:
    logprobs = {"top_logprobs": [{"token_id:5": -0.5, "token_id:6": -1.0}]}
    choice = {"token_ids": [5], "text": "five", "logprobs": logprobs}
    return {"choices": [choice], "usage": {"prompt_tokens": 3}, **more}


class Recorder:
    """A stand-in for instances that keeps the requests it got."""

    def __init__(self) -> None:
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return httpx.Response(200, json=_reply(kv_transfer_params=PARAMETERS if request.url.port == 1 else None))

    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(request.content) for request in self.requests]


def _dispatcher(handler: Callable[[httpx.Request], httpx.Response]) -> Dispatcher:
    return Dispatcher(transport=httpx.MockTransport(handler))


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def test_the_prefill_leg_asks_for_one_token_and_a_handover(recorder: Recorder) -> None:
    with _dispatcher(recorder) as dispatcher:
        dispatcher.both_legs(PREFILL, DECODE, [1, 2, 3])
    body = recorder.bodies()[0]
    assert body["kv_transfer_params"] == PREFILL_PARAMETERS
    assert (body["max_tokens"], body["min_tokens"], body["stream"]) == (1, 1, False)


def test_the_parameters_reach_the_decode_leg_verbatim(recorder: Recorder) -> None:
    with _dispatcher(recorder) as dispatcher:
        legs = dispatcher.both_legs(PREFILL, DECODE, [1, 2, 3])
    assert recorder.bodies()[1]["kv_transfer_params"] == PARAMETERS
    assert legs.prefill.kv_transfer_params == PARAMETERS


def test_both_legs_carry_the_same_request_id_and_each_its_own_rank(recorder: Recorder) -> None:
    with _dispatcher(recorder) as dispatcher:
        legs = dispatcher.both_legs(PREFILL, DECODE, [1, 2, 3], prefill_rank=1, decode_rank=0)
    assert [request.headers["X-Request-Id"] for request in recorder.requests] == [legs.request_id] * 2
    assert [request.headers["X-data-parallel-rank"] for request in recorder.requests] == ["1", "0"]


def test_no_rank_is_sent_where_none_is_asked_for(recorder: Recorder) -> None:
    with _dispatcher(recorder) as dispatcher:
        dispatcher.complete(PREFILL, "text")
    assert "X-data-parallel-rank" not in recorder.requests[0].headers


def test_an_answer_gives_tokens_and_candidates_by_token_id(recorder: Recorder) -> None:
    with _dispatcher(recorder) as dispatcher:
        answer = dispatcher.complete(PREFILL, [1, 2, 3])
    assert answer.tokens == (5,)
    assert answer.candidates == ({5: -0.5, 6: -1.0},)
    assert answer.prompt_tokens == 3


def _status_500(request: httpx.Request) -> httpx.Response:
    return httpx.Response(500, text="engine dead")


def _not_json(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, text="<html>")


def _no_choices(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={"choices": []})


def _unreachable(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("connection refused")


def _silent(request: httpx.Request) -> httpx.Response:
    raise httpx.ReadTimeout("timed out")


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (_status_500, "answered 500: engine dead"),
        (_not_json, "not JSON"),
        (_no_choices, "not a completion"),
        (_unreachable, "did not answer: connection refused"),
        (_silent, "did not answer within 120 s"),
    ],
)
def test_what_is_not_an_answer_is_a_dispatch_error(
    handler: Callable[[httpx.Request], httpx.Response], said: str
) -> None:
    with _dispatcher(handler) as dispatcher, pytest.raises(DispatchError, match=said):
        dispatcher.complete(PREFILL, [1])


class _OncePerConnection(BaseHTTPRequestHandler):
    """Says it keeps connections and yet closes each on its second request, as a server that takes it for idle does."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        if getattr(self, "answered", False):
            self.close_connection = True
            return
        self.answered = True
        body = json.dumps(_reply()).encode()
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_no_request_is_lost_on_a_connection_that_the_instance_closes_as_idle() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _OncePerConnection) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with Dispatcher() as dispatcher:
            for _ in range(3):
                dispatcher.complete(f"http://127.0.0.1:{server.server_port}", [1])
        server.shutdown()
