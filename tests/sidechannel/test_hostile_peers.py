"""A listener and peers that mean harm, or are broken: valid requests are answered meanwhile, and memory is bounded.

Peers that open very many connections are processes of their own, so that each side has its own limit of open files.
"""

import contextlib
import logging
import os
import resource
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from kvferry.protocol.messages import MAX_REQUEST_BYTES, Ack, Hello, Release, Released, encode
from kvferry.sidechannel import server as module
from kvferry.sidechannel.client import Client
from kvferry.sidechannel.server import Listener

from .peers import DEADLINE_S, TOKEN, ask, closed_by_peer, connect, pack

REPOSITORY = Path(__file__).parents[2]
HELLO = Hello(TOKEN)
MIB = 1 << 20
LONG_BYTES = 4 * MIB
VERY_LONG = Ack(TOKEN, "r", TOKEN, "pp0tp0")
VERY_LONG_BYTES = 32 * MIB

CROWD = """
import os, socket, sys
port, count = int(sys.argv[1]), int(sys.argv[2])
crowd = []
for number in range(count):
    crowd.append(socket.create_connection(("127.0.0.1", port), timeout=60))
print(len(crowd), flush=True)
sys.stdin.read()
"""


def _answer(message, respond):
    """``Hello`` is answered with a lot, made anew each time, and ``VERY_LONG`` with more."""
    if message == VERY_LONG:
        return bytes(VERY_LONG_BYTES)
    return b"\x01" * LONG_BYTES if isinstance(message, Hello) else encode(Released())


@pytest.fixture
def listen():
    listeners = []

    def make(**options):
        listeners.append(Listener("127.0.0.1", 0, _answer, lambda: None, **options))
        return listeners[-1]

    yield make
    for listener in listeners:
        listener.close()


@pytest.fixture
def client():
    client = Client("test-client")
    yield client
    client.close()


def _served(client, listener):
    return ask(client, listener.port, Release(TOKEN, "r", TOKEN, TOKEN)) == Released()


def _wait(condition, what):
    """Until ``condition`` holds; the listener tells nobody when it drops a peer."""
    pause = threading.Event()
    for _ in range(int(DEADLINE_S / 0.02)):
        if condition():
            return
        pause.wait(0.02)
    pytest.fail(f"still not {what}")


def _until_cut_off(action, times):
    """Repeat ``action`` until the other end has closed."""
    for number in range(times):
        try:
            action(number)
        except OSError:
            return
    pytest.fail("still connected")


class Memory:
    """Resident bytes of this process since the start of the block."""

    def __enter__(self):
        self._before = psutil.Process().memory_info().rss
        return self

    def grown(self):
        return psutil.Process().memory_info().rss - self._before

    def __exit__(self, *_):
        pass


ZMTP_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
GOOD = pack(Release(TOKEN, "r", TOKEN, TOKEN))

NO_FRAMES = {
    "random": os.urandom(4096),
    "an HTTP request": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(600),
    "a ZeroMQ greeting": ZMTP_GREETING,
    "a length of zero": bytes(64),
    "a length below a header": struct.pack(">I", 55) + bytes(55),
    "a length over the limit": struct.pack(">I", MAX_REQUEST_BYTES + 57),
    "the greatest length": b"\xff" * 4,
    "a frame, then junk": GOOD + b"\xff" * 100,
}


@pytest.mark.parametrize("junk", NO_FRAMES.values(), ids=NO_FRAMES)
def test_what_is_no_frame_ends_the_connection_and_nothing_else(listen, client, junk):
    listener = listen()
    with connect(listener.port) as raw:
        raw.sendall(junk)
        assert closed_by_peer(raw)
        assert _served(client, listener)
    assert listener.ignored == 1


NO_MESSAGES = {
    "nothing": b"",
    "random": b"\xc1" + os.urandom(1000),
    "another type": encode(Released()),
    "an unknown type": encode({"type": "Explode"}),
    "a type that is a number": encode({"type": 3}),
    "no type": encode({"incarnation": TOKEN}),
    "a list": encode([TOKEN]),
    "a wrong field": encode({"type": "Hello", "incarnation": {"a": 1}}),
    "deep nesting": b"\x91" * 500_000,
    "deep objects": b"\x81\xa1a" * 200_000,
    "a list that promises four billion items": b"\xdd\xff\xff\xff\xff",
    "bytes that promise four gigabytes": b"\xc6\xff\xff\xff\xff",
    "the longest": b"\x00" * MAX_REQUEST_BYTES,
    "half a message": encode(HELLO)[:-7],
    "two messages": encode(HELLO) * 2,
}


@pytest.mark.parametrize("body", NO_MESSAGES.values(), ids=NO_MESSAGES)
def test_what_is_no_message_is_ignored_and_the_next_one_answered(listen, client, body, caplog):
    listener = listen()
    with connect(listener.port) as raw, caplog.at_level(logging.WARNING):
        raw.sendall(pack(body) * 3 + GOOD)
        raw.settimeout(DEADLINE_S)
        assert raw.recv(4)
        assert _served(client, listener)
    assert listener.ignored == 3
    assert len(caplog.records) == 1


@pytest.mark.parametrize("cut", [1, 3, 4, 30, 60, len(GOOD) - 1])
def test_a_frame_that_ends_early_costs_its_connection_only(listen, client, cut):
    listener = listen()
    with connect(listener.port) as raw:
        raw.sendall(GOOD[:cut])
        raw.shutdown(socket.SHUT_WR)
        assert closed_by_peer(raw)
    assert _served(client, listener)


def test_a_peer_that_resets_its_connection_harms_nobody(listen, client):
    listener = listen()
    for _ in range(100):
        raw = connect(listener.port)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raw.sendall(GOOD[:40])
        raw.close()
    assert _served(client, listener)
    _wait(lambda: listener.connections == 1, "rid of the dead connections")


@pytest.mark.parametrize("says", [b"", GOOD[:1], GOOD[:50], pack(b"junk")], ids=["nothing", "a byte", "half", "junk"])
def test_a_peer_that_never_says_anything_valid_is_dropped(listen, says):
    listener = listen(patience=0.1)
    with connect(listener.port) as raw:
        raw.sendall(says)
        assert closed_by_peer(raw)
    _wait(lambda: listener.connections == 0, "alone")


def test_a_slow_sender_is_dropped_however_often_it_sends_a_byte(listen, client):
    listener = listen(patience=0.5)
    with connect(listener.port) as raw:
        raw.sendall(GOOD + GOOD[:4])

        def send(number):
            raw.sendall(GOOD[4 + number : 5 + number])
            assert _served(client, listener)
            threading.Event().wait(0.1)

        _until_cut_off(send, 30)


def test_a_known_peer_may_be_quiet_for_as_long_as_it_likes(listen, client):
    listener = listen(patience=0.1)
    assert _served(client, listener)
    with connect(listener.port) as raw:  # a stranger's end shows that time has passed for the other one too
        assert closed_by_peer(raw)
    assert listener.connections == 1
    assert _served(client, listener)


def test_a_message_without_end_is_not_kept(listen, client):
    """ZeroMQ takes any number of parts of a message into memory; a length says all at once."""
    listener = listen()
    with connect(listener.port) as raw, Memory() as memory:
        raw.sendall(struct.pack(">I", MAX_REQUEST_BYTES + 56))
        raw.settimeout(DEADLINE_S)

        def send(_):
            raw.sendall(b"\xff" * MIB)  # what follows the first MiB is no frame, and ends the connection
            assert _served(client, listener)

        _until_cut_off(send, 200)
        assert memory.grown() < 20 * MIB


def test_many_messages_that_never_end_are_bounded_together(listen, client, monkeypatch):
    monkeypatch.setattr(module, "MAX_PARTIAL_BYTES", 8 * MIB)
    listener = listen()
    crowd = [connect(listener.port) for _ in range(100)]
    try:
        with Memory() as memory:
            for raw in crowd:
                raw.sendall(struct.pack(">I", MAX_REQUEST_BYTES) + bytes(MAX_REQUEST_BYTES - 100))
                assert _served(client, listener)
            assert memory.grown() < 30 * MIB
        _wait(lambda: listener.connections < 20, "rid of most")
    finally:
        for raw in crowd:
            raw.close()


def test_a_peer_that_never_takes_its_replies_is_bounded_and_then_dropped(listen, client):
    listener = listen(patience=1.0)
    with connect(listener.port) as raw, Memory() as memory:
        raw.setblocking(False)
        requests, sent = pack(HELLO) * 1000, []

        def send(_):
            try:
                sent.append(raw.send(requests))
            except BlockingIOError:
                assert _served(client, listener)
                threading.Event().wait(0.01)

        _until_cut_off(send, 1000)
        assert sum(sent) > len(requests)  # 4 GiB of replies, if the listener had gone on reading
        assert memory.grown() < 30 * MIB


def test_a_slow_reader_gets_its_whole_reply(listen):
    listener = listen(patience=0.5)
    with connect(listener.port) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        raw.sendall(pack(VERY_LONG) + GOOD)
        missing = VERY_LONG_BYTES + 60 + 60 + len(encode(Released()))
        pause, began, taken = threading.Event(), time.monotonic(), 0
        while missing and (data := raw.recv(MIB)):
            missing -= len(data)
            taken += len(data)
            # Steadily, over four times what a peer has that takes nothing.
            pause.wait(max(0.0, began + 2.0 * taken / VERY_LONG_BYTES - time.monotonic()))
        assert missing == 0


def test_when_there_is_no_room_strangers_make_it(listen, client):
    listener = listen(max_connections=20)
    known = connect(listener.port)
    known.sendall(GOOD)
    known.settimeout(DEADLINE_S)
    assert known.recv(1)
    crowd = [connect(listener.port) for _ in range(200)]
    try:
        assert _served(client, listener)
        assert listener.connections == 20
        known.recv(1000)
        known.sendall(GOOD)
        assert known.recv(1)
        assert closed_by_peer(crowd[0])
    finally:
        for raw in (known, *crowd):
            raw.close()


def test_peers_that_are_known_are_not_dropped_for_others(listen):
    listener = listen(max_connections=5)
    known = [connect(listener.port) for _ in range(5)]
    for raw in known:
        raw.sendall(GOOD)
        assert raw.recv(1)
    with connect(listener.port) as late:
        assert closed_by_peer(late)
    for raw in known:
        raw.recv(1000)
        raw.sendall(GOOD)
        assert raw.recv(1)
        raw.close()


@contextlib.contextmanager
def _no_free_files(but):
    """No file can be opened above the highest of these."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(raw.fileno() for raw in but) + 1, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _fill(count):
    """Sockets, not connected yet, that leave no gap among the open files."""
    return [socket.socket() for _ in range(count)]


def _in_a_process_of_its_own(body):
    """Where no other test's engines, threads or garbage open and close files."""
    command = [sys.executable, "-c", f"from {__name__} import {body.__name__}; {body.__name__}()"]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=5 * DEADLINE_S)


@contextlib.contextmanager
def _listening():
    listener, client = Listener("127.0.0.1", 0, _answer, lambda: None, patience=60.0), Client("test-client")
    with contextlib.closing(listener), contextlib.closing(client):
        assert _served(client, listener)
        yield listener, client


def _strangers_make_room():
    with _listening() as (listener, client):
        crowd = [connect(listener.port) for _ in range(20)]
        _wait(lambda: listener.connections == 21, "connected to all")
        late = _fill(20)
        with _no_free_files(late):
            for raw in late:
                raw.connect(("127.0.0.1", listener.port))
            late[-1].sendall(GOOD)
            late[-1].settimeout(DEADLINE_S)
            assert late[-1].recv(1)
            assert _served(client, listener)
        assert closed_by_peer(crowd[0])


def _known_peers_are_served_without_haste_and_new_ones_later():
    with _listening() as (listener, client):
        late = _fill(20)
        with _no_free_files(late):
            late[-1].connect(("127.0.0.1", listener.port))
            before = time.process_time()
            threading.Event().wait(1.0)
            assert time.process_time() - before < 0.3
            assert _served(client, listener)
            assert listener.connections == 1
        late[-1].sendall(GOOD)
        late[-1].settimeout(DEADLINE_S)
        assert late[-1].recv(1)


def test_in_a_process_without_free_files_strangers_make_room():
    _in_a_process_of_its_own(_strangers_make_room)


def test_in_a_process_without_free_files_known_peers_are_served_without_haste_and_new_ones_later():
    _in_a_process_of_its_own(_known_peers_are_served_without_haste_and_new_ones_later)


@pytest.mark.timeout(100)
def test_ten_thousand_connections_opened_and_left(listen, client):
    """As many as this system lets one process have; the listener keeps none for longer than its patience."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    count = 10_000 if files < 0 else min(10_000, files - 1000)
    listener = listen(max_connections=count + 100)
    assert _served(client, listener)
    with Memory() as memory:
        crowd = subprocess.Popen(
            [sys.executable, "-c", CROWD, str(listener.port), str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            while not _readable(crowd.stdout, 0.05):
                assert crowd.poll() is None
                assert _served(client, listener)
            assert int(crowd.stdout.readline()) == count
            newcomer = Client("newcomer")
            try:
                assert _served(newcomer, listener)
            finally:
                newcomer.close()
            assert memory.grown() < 100 * MIB
            pause = threading.Event()
            while listener.connections > 1:
                assert _served(client, listener)
                pause.wait(0.1)
        finally:
            crowd.communicate()


def _readable(stream, seconds):
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        return bool(selector.select(seconds))


def test_a_peer_with_anothers_sender_id_gets_none_of_its_replies(listen):
    """Replies go back over the connection that asked; a sender id is only a name."""
    listener = listen()
    with connect(listener.port) as one, connect(listener.port) as other:
        for raw, number in ((one, 1), (other, 2)):
            raw.sendall(pack(Release(TOKEN, "r", TOKEN, TOKEN), number, b"same sender id.."))
        for raw, number in ((one, 1), (other, 2)):
            raw.settimeout(DEADLINE_S)
            assert int.from_bytes(raw.recv(1000)[52:60], "big") == number
