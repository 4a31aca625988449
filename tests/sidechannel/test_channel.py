"""Listener and client over real sockets on the loopback interface."""

import queue
import socket
import subprocess
import sys
import threading
import time

import pytest

from kvferry.errors import SideChannelError
from kvferry.protocol.messages import Gone, Granted, Hello, Release, Released, encode
from kvferry.sidechannel.client import Client
from kvferry.sidechannel.server import Listener

from .peers import DEADLINE_S, TOKEN, Replies, ask


def _no_wish():
    return None


def _answer(message, respond):
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


def test_a_request_gets_its_answer(listener, client):
    assert ask(client, listener.port, Hello(TOKEN)) == Gone("Hello")


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
        assert ask(client, listener.port, Hello(TOKEN), host="::1") == Gone("Hello")
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


def test_an_answer_may_come_later_and_from_another_thread(client):
    kept = []

    def answer(message, respond):
        return kept.append(respond) if isinstance(message, Hello) else _answer(message, respond)

    listener, replies = Listener("127.0.0.1", 0, answer, _no_wish), Replies()
    try:
        client.send(("127.0.0.1", listener.port), Hello(TOKEN), DEADLINE_S, replies)
        assert ask(client, listener.port, Release(TOKEN, "r", TOKEN, TOKEN)) == Released(), "others are not held up"
        assert replies.got == []
        threading.Thread(target=kept[0], args=[encode(Gone("later"))]).start()
        assert replies.wait() == [Gone("later")]
    finally:
        listener.close()


def test_an_answer_for_a_peer_that_has_left_is_dropped(client):
    kept, left = queue.SimpleQueue(), Client("test-leaver")

    def answer(message, respond):
        return kept.put(respond) if isinstance(message, Hello) else _answer(message, respond)

    listener = Listener("127.0.0.1", 0, answer, _no_wish)
    try:
        left.send(("127.0.0.1", listener.port), Hello(TOKEN), DEADLINE_S, Replies())
        respond = kept.get(timeout=DEADLINE_S)
        left.close()
        respond(encode(Gone("later")))
        assert ask(client, listener.port, Release(TOKEN, "r", TOKEN, TOKEN)) == Released()
    finally:
        listener.close()


def test_the_listener_survives_a_handler_that_raises(client):
    def answer(message, respond):
        if isinstance(message, Release):
            raise RuntimeError("handler")
        return _answer(message, respond)

    listener = Listener("127.0.0.1", 0, answer, _no_wish)
    try:
        assert ask(client, listener.port, Release(TOKEN, "r", TOKEN, TOKEN), timeout=0.2) is None
        assert ask(client, listener.port, Hello(TOKEN)) == Gone("Hello")
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


def test_a_tick_that_raises_is_left_alone_for_a_second_and_hinders_no_message(caplog):
    calls = []

    def tick():
        calls.append(time.monotonic())
        raise RuntimeError("tick")

    listener, client = Listener("127.0.0.1", 0, _answer, tick), Client("test-client", tick)
    try:
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            assert ask(client, listener.port, Hello(TOKEN)) == Gone("Hello")
            client.wake()
    finally:
        client.close()
        listener.close()
    assert 4 <= len(calls) <= 6
    assert caplog.text.count("RuntimeError: tick") == len(calls)


def test_a_client_ticks_when_it_is_woken_and_after_replies(listener):
    ticks = threading.Semaphore(0)
    client = Client("test-client", ticks.release)
    try:
        began = time.monotonic()
        for _ in range(10):
            ask(client, listener.port, Hello(TOKEN))
            client.wake()
        assert all(ticks.acquire(timeout=DEADLINE_S) for _ in range(20))
        assert time.monotonic() - began < DEADLINE_S / 2
    finally:
        client.close()


def test_a_host_that_never_answers_costs_its_timeout_and_delays_nobody_else(listener, client):
    silent = socket.create_server(("127.0.0.1", 0))
    try:
        slow = Replies()
        client.send(("127.0.0.1", silent.getsockname()[1]), Hello(TOKEN), 0.5, slow)
        assert ask(client, listener.port, Hello(TOKEN)) == Gone("Hello")
        assert slow.got == []
        assert slow.wait() == [None]
    finally:
        silent.close()


@pytest.mark.parametrize("host", ["no such host", "", "x" * 5000])
def test_an_address_that_is_none_is_answered_with_nothing(client, host):
    assert ask(client, 5600, Hello(TOKEN), timeout=1.0, host=host) is None


def test_a_producer_that_comes_back_on_its_port_is_reached_again(client):
    listener = Listener("127.0.0.1", 0, _answer, _no_wish)
    assert ask(client, listener.port, Hello(TOKEN)) == Gone("Hello")
    listener.close()
    assert ask(client, listener.port, Hello(TOKEN), timeout=0.3) is None
    again = Listener("127.0.0.1", listener.port, _answer, _no_wish)
    try:
        assert ask(client, again.port, Hello(TOKEN)) == Gone("Hello")
    finally:
        again.close()


def test_an_answer_that_is_no_reply_counts_as_none(client):
    listener = Listener("127.0.0.1", 0, lambda *_: b"\xff", _no_wish)
    try:
        assert ask(client, listener.port, Hello(TOKEN)) is None
    finally:
        listener.close()


def test_a_callback_that_raises_does_not_end_the_client(listener, client):
    def explode(_):
        raise RuntimeError("callback")

    client.send(("127.0.0.1", listener.port), Hello(TOKEN), DEADLINE_S, explode)
    assert ask(client, listener.port, Hello(TOKEN)) == Gone("Hello")


def test_a_refused_connection_is_answered_at_once(client):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    began = time.monotonic()
    assert ask(client, port, Hello(TOKEN), timeout=60) is None
    assert time.monotonic() - began < DEADLINE_S / 2


def test_a_name_is_resolved(listener, client):
    assert ask(client, listener.port, Hello(TOKEN), host="localhost") == Gone("Hello")


def test_an_address_that_does_not_answer_is_followed_by_the_next_one_of_its_name(listener, client, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        dead = server.getsockname()
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", at) for at in (dead, ("127.0.0.1", listener.port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: list(found))
    assert ask(client, 1, Hello(TOKEN), host="prefill") == Gone("Hello")


def test_a_name_server_that_hangs_delays_nobody_else(listener, client, monkeypatch):
    answered = threading.Event()
    resolve = socket.getaddrinfo

    def slow(host, *args, **options):
        if host.startswith("slow"):
            answered.wait(DEADLINE_S)
        return resolve(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    replies = Replies()
    for number in range(100):
        client.send((f"slow{number}", listener.port), Hello(TOKEN), 1.0, replies)
    assert ask(client, listener.port, Hello(TOKEN)) == Gone("Hello")
    assert ask(client, listener.port, Hello(TOKEN), host="localhost") == Gone("Hello")
    assert replies.got == []
    assert replies.wait(100) == [None] * 100
    answered.set()


def test_a_long_reply_arrives_whole(client):
    long = Granted([list(range(1_000_000))], 40, 30.0, 40)
    listener = Listener("127.0.0.1", 0, lambda *_: encode(long), _no_wish)
    try:
        assert ask(client, listener.port, Hello(TOKEN)) == long
    finally:
        listener.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "::", "localhost"])
def test_every_way_to_name_an_address_can_be_bound(client, host):
    listener = Listener(host, 0, _answer, _no_wish)
    try:
        assert ask(client, listener.port, Hello(TOKEN), host="localhost") == Gone("Hello")
    finally:
        listener.close()


def test_closing_a_client_answers_what_is_pending():
    client, replies = Client("test-client"), Replies()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client.send(silent.getsockname(), Hello(TOKEN), 60, replies)
        client.close()
        client.close()
    assert replies.wait() == [None]
    assert ask(client, 5600, Hello(TOKEN)) is None


def test_what_is_sent_while_a_client_closes_is_answered_once(listener):
    for _ in range(20):
        client, replies, begun = Client("test-client"), Replies(), threading.Event()

        def send(client=client, replies=replies, begun=begun):
            for _ in range(200):
                client.send(("127.0.0.1", listener.port), Hello(TOKEN), 60, replies)
                begun.set()

        sender = threading.Thread(target=send)
        sender.start()
        assert begun.wait(DEADLINE_S)
        client.close()
        sender.join(DEADLINE_S)
        assert len(replies.wait(200)) == 200


STUCK = """
import socket, threading
from kvferry.protocol.messages import Hello
from kvferry.sidechannel.client import Client
from kvferry.sidechannel.server import Listener
asked = threading.Event()
listener = Listener("127.0.0.1", 0, lambda *_: b"", lambda: None)
socket.getaddrinfo = lambda *_, **__: asked.set() or threading.Event().wait()
client = Client("stuck")
client.send(("name", 1), Hello("1" * 32), 60, print)
asked.wait()
"""


def test_a_process_ends_while_a_name_server_hangs():
    """The interpreter waits for no thread of a client that nobody closed."""
    subprocess.run([sys.executable, "-c", STUCK], timeout=DEADLINE_S, check=True)


IDLE = """
import threading, time
from kvferry.protocol.messages import Hello, encode, Gone
from kvferry.sidechannel.client import Client
from kvferry.sidechannel.server import Listener
answered = threading.Event()
listener = Listener("127.0.0.1", 0, lambda *_: encode(Gone("")), lambda: None)
client = Client("idle")
client.send(("127.0.0.1", listener.port), Hello("1" * 32), 60, lambda _: answered.set())
assert answered.wait(60)
before, began = time.process_time(), time.monotonic()
threading.Event().wait(1.0)
print((time.process_time() - before) / (time.monotonic() - began))
"""


def test_an_idle_client_and_listener_cost_next_to_nothing():
    """In a process of their own: the CPU time of this one has that of other tests' threads in it."""
    done = subprocess.run(
        [sys.executable, "-c", IDLE], timeout=DEADLINE_S, check=True, stdout=subprocess.PIPE, text=True
    )
    assert float(done.stdout) < 0.05
