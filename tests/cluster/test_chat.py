"""A streamed chat answer is put together from its events."""

import http.server
import json
import threading
from collections.abc import Iterator

import pytest

from kvferry.cluster.chat import Answer, ask
from kvferry.errors import DispatchError

EVENTS = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
    {"choices": [{"delta": {"content": "The"}, "token_ids": [5], "finish_reason": None}]},
    {"choices": [{"delta": {"content": " capital"}, "token_ids": [6, 7], "finish_reason": "stop"}]},
    {"choices": [], "usage": {"completion_tokens": 3}},
]


class Stub(http.server.ThreadingHTTPServer):
    """Answers every request with `events`, or with `status` alone."""

    events: list[dict]
    status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Stub

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(self.server.status)
        self.end_headers()
        for event in self.server.events:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub(("127.0.0.1", 0), _Handler) as server:
        server.events = EVENTS
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_pieces_are_shown_as_they_come_and_joined(stub: Stub) -> None:
    shown: list[str] = []
    assert ask(stub.url, "?", 8, show=shown.append) == Answer("The capital", (5, 6, 7))
    assert "".join(shown) == "The capital"


def test_an_answer_that_stops_in_the_middle_is_an_error(stub: Stub) -> None:
    stub.events = EVENTS[:2]
    with pytest.raises(DispatchError, match="before it was finished"):
        ask(stub.url, "?", 8)


def test_an_error_in_the_stream_is_an_error(stub: Stub) -> None:
    stub.events = [*EVENTS[:2], {"error": {"message": "engine dead"}}]
    with pytest.raises(DispatchError, match="engine dead"):
        ask(stub.url, "?", 8)


def test_an_error_status_is_an_error(stub: Stub) -> None:
    stub.status = 503
    with pytest.raises(DispatchError, match="answered 503"):
        ask(stub.url, "?", 8)


def test_a_server_that_is_not_there_is_an_error() -> None:
    with pytest.raises(DispatchError, match="did not answer"):
        ask("http://127.0.0.1:1", "?", 8)
