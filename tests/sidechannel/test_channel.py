"""Listener and client over real sockets on the loopback interface."""

import socket
import threading
import time

import msgspec
import pytest
import zmq

from kvferry.errors import SideChannelError
from kvferry.protocol.messages import Gone, Hello, Release, Released, encode
from kvferry.sidechannel.client import Client
from kvferry.sidechannel.server import Listener
from kvferry.sidechannel.sockets import endpoint

TOKEN = "1" * 32
DEADLINE_S = 10.0


def _no_wish():
    return None


def _answer(message):
    return encode(Released() if isinstance(message, Release) else Gone(type(message).__name__))


@pytest.fixture
def listener():
    listener = Listener("127.0.0.1", 0, _answer, _no_wish)
    yield listener
    listener.close()


@pytest.fixture
def client():
    client = Client("test-client")
    yield client
    client.close()


class Replies:
    """Collects replies; ``wait`` blocks until there are so many."""

    def __init__(self) -> None:
        self.got: list = []
        self._change = threading.Condition()

    def __call__(self, reply) -> None:
        with self._change:
            self.got.append(reply)
            self._change.notify_all()

    def wait(self, count=1):
        with self._change:
            assert self._change.wait_for(lambda: len(self.got) >= count, DEADLINE_S), f"only {self.got}"
        return self.got


def _ask(client, port, message, timeout=DEADLINE_S, host="127.0.0.1"):
    replies = Replies()
    client.send((host, port), message, timeout, replies)
    return replies.wait()[0]


def _raw(listener):
    context = zmq.Context()
    raw = context.socket(zmq.DEALER)
    raw.setsockopt(zmq.LINGER, 0)
    raw.connect(endpoint("127.0.0.1", listener.port))
    return context, raw


def test_a_request_gets_its_answer(listener, client):
    assert _ask(client, listener.port, Hello(TOKEN)) == Gone("Hello")


def test_messages_to_one_address_are_answered_in_order(listener, client):
    replies = Replies()
    for number in range(100):
        message = Hello(TOKEN) if number % 2 else Release(TOKEN, "r", TOKEN, TOKEN)
        client.send(("127.0.0.1", listener.port), message, DEADLINE_S, replies)
    assert replies.wait(100) == [Released(), Gone("Hello")] * 50


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_ipv6_works():
    try:
        listener = Listener("::1", 0, _answer, _no_wish)
    except SideChannelError:
        pytest.skip("this machine has no IPv6 loopback")
    client = Client("test-client")
    try:
        assert _ask(client, listener.port, Hello(TOKEN), host="::1") == Gone("Hello")
    finally:
        client.close()
        listener.close()


def test_a_port_in_use_stops_the_start_and_says_what_to_set(listener):
    with pytest.raises(SideChannelError, match=rf"127.0.0.1:{listener.port}.*side_channel_port"):
        Listener("127.0.0.1", listener.port, _answer, _no_wish)


def test_a_closed_listener_gives_its_port_back(listener):
    listener.close()
    listener.close()
    Listener("127.0.0.1", listener.port, _answer, _no_wish).close()


@pytest.mark.parametrize(
    "frames",
    [[b""], [b"1", b""], [b"1", b"\xff" * 100], [b"1", b"2", b"3"], [b"1", msgspec.msgpack.encode({"type": 3})]],
    ids=["one frame", "empty", "junk", "three frames", "wrong type"],
)
def test_the_listener_ignores_and_counts_what_is_no_message(listener, client, frames):
    context, raw = _raw(listener)
    try:
        raw.send_multipart(frames)
        raw.send_multipart([b"9", encode(Hello(TOKEN))])
        assert raw.poll(DEADLINE_S * 1000)
        raw.recv_multipart()
        assert listener.ignored == 1
    finally:
        context.destroy(linger=0)


def test_the_listener_survives_a_peer_that_does_not_speak_its_protocol(listener, client):
    with socket.create_connection(("127.0.0.1", listener.port), timeout=DEADLINE_S) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    assert _ask(client, listener.port, Hello(TOKEN)) == Gone("Hello")


def test_the_listener_survives_a_handler_that_raises(client):
    def answer(message):
        if isinstance(message, Release):
            raise RuntimeError("handler")
        return _answer(message)

    listener = Listener("127.0.0.1", 0, answer, _no_wish)
    try:
        assert _ask(client, listener.port, Release(TOKEN, "r", TOKEN, TOKEN), timeout=0.2) is None
        assert _ask(client, listener.port, Hello(TOKEN)) == Gone("Hello")
    finally:
        listener.close()


def test_the_listener_ticks_when_it_asked_to():
    ticks = threading.Semaphore(0)

    def tick():
        ticks.release()
        return 0.01

    listener = Listener("127.0.0.1", 0, _answer, tick)
    try:
        assert all(ticks.acquire(timeout=DEADLINE_S) for _ in range(5))
    finally:
        listener.close()


def test_a_host_that_never_answers_costs_its_timeout_and_delays_nobody_else(listener, client):
    silent = socket.create_server(("127.0.0.1", 0))
    try:
        slow = Replies()
        client.send(("127.0.0.1", silent.getsockname()[1]), Hello(TOKEN), 0.5, slow)
        assert _ask(client, listener.port, Hello(TOKEN)) == Gone("Hello")
        assert slow.got == []
        assert slow.wait() == [None]
    finally:
        silent.close()


@pytest.mark.parametrize("host", ["no such host", "", "x" * 5000])
def test_an_address_that_is_none_is_answered_with_nothing(client, host):
    assert _ask(client, 5600, Hello(TOKEN), timeout=1.0, host=host) is None


def test_a_producer_that_comes_back_on_its_port_is_reached_again(client):
    listener = Listener("127.0.0.1", 0, _answer, _no_wish)
    assert _ask(client, listener.port, Hello(TOKEN)) == Gone("Hello")
    listener.close()
    assert _ask(client, listener.port, Hello(TOKEN), timeout=0.3) is None
    again = Listener("127.0.0.1", listener.port, _answer, _no_wish)
    try:
        assert _ask(client, again.port, Hello(TOKEN)) == Gone("Hello")
    finally:
        again.close()


def test_an_answer_that_is_no_reply_counts_as_none(client):
    listener = Listener("127.0.0.1", 0, lambda _: b"\xff", _no_wish)
    try:
        assert _ask(client, listener.port, Hello(TOKEN)) is None
    finally:
        listener.close()


def test_a_callback_that_raises_does_not_end_the_client(listener, client):
    def explode(_):
        raise RuntimeError("callback")

    client.send(("127.0.0.1", listener.port), Hello(TOKEN), DEADLINE_S, explode)
    assert _ask(client, listener.port, Hello(TOKEN)) == Gone("Hello")


def test_closing_a_client_answers_what_is_pending():
    client, replies = Client("test-client"), Replies()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client.send(silent.getsockname(), Hello(TOKEN), 60, replies)
        client.close()
        client.close()
    assert replies.wait() == [None]
    assert _ask(client, 5600, Hello(TOKEN)) is None


def test_an_idle_client_and_listener_cost_next_to_nothing(listener, client):
    _ask(client, listener.port, Hello(TOKEN))
    before, began = time.process_time(), time.monotonic()
    threading.Event().wait(1.0)
    assert time.process_time() - before < 0.05 * (time.monotonic() - began)
