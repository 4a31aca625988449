"""The side channel with a secret, and without one: what is believed, and what is met with silence."""

import contextlib
import logging
import socket
import threading

import pytest

from kvferry.protocol.authentication import Purpose, Seal
from kvferry.protocol.messages import Gone, Hello, Released, Renew, encode
from kvferry.sidechannel import server as module
from kvferry.sidechannel.client import Client
from kvferry.sidechannel.server import Listener

from .peers import DEADLINE_S, TOKEN, Frames, Replies, ask, closed_by_peer, connect, pack

SECRET = b"a secret of enough bytes"
SEAL = Seal(SECRET)
OTHER = Seal(b"another secret of enough bytes")
SILENCE_S = 0.3
HELLO = Hello(TOKEN)


@pytest.fixture
def heard():
    """Messages that reached the handler."""
    return []


@pytest.fixture
def listen(heard):
    listeners = []

    def make(seal, answer=None, host="127.0.0.1"):
        def note(message, respond):
            heard.append(message)
            return encode(Released())

        listeners.append(Listener(host, 0, answer or note, lambda: None, seal))
        return listeners[-1]

    yield make
    for listener in listeners:
        listener.close()


@pytest.fixture
def make_client():
    clients = []

    def make(seal=None):
        clients.append(Client("test-client", seal=seal))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def test_both_sides_with_one_secret_understand_each_other(listen, make_client):
    assert ask(make_client(Seal(SECRET)), listen(SEAL).port, HELLO) == Released()


@pytest.mark.parametrize("theirs", [Seal(), OTHER], ids=["no secret", "another secret"])
def test_a_message_without_this_secrets_signature_is_met_with_silence(listen, make_client, heard, theirs, caplog):
    listener = listen(SEAL)
    with caplog.at_level(logging.WARNING):
        client = make_client(theirs)
        assert [ask(client, listener.port, HELLO, SILENCE_S) for _ in range(3)] == [None] * 3
    assert (heard, listener.ignored) == ([], 3)
    assert caplog.text.count("not signed with this engine's secret") == 1
    assert ask(make_client(SEAL), listener.port, HELLO) == Released()


def _reply(raw):
    """The next frame, None if there is none for a while."""
    raw.settimeout(SILENCE_S)
    try:
        return Frames(raw).next()
    except TimeoutError:
        return None


def test_a_repeated_message_is_met_with_silence(listen, heard):
    listener = listen(SEAL)
    overheard = pack(HELLO, number=5, seal=SEAL)
    with connect(listener.port) as raw, connect(listener.port) as eavesdropper:
        raw.sendall(overheard)
        assert _reply(raw).number == 5
        eavesdropper.sendall(overheard)
        assert _reply(eavesdropper) is None
        eavesdropper.sendall(pack(HELLO, number=4, seal=SEAL))
        assert _reply(eavesdropper) is None
        raw.sendall(pack(HELLO, number=6, seal=SEAL))
        assert _reply(raw).number == 6
    assert (len(heard), listener.ignored) == (2, 2)


@pytest.mark.parametrize("at", range(0, 61 + len(encode(HELLO)), 7))
def test_a_message_altered_at_any_byte_is_met_with_silence(listen, heard, at):
    listener = listen(SEAL)
    frame = bytearray(pack(HELLO, number=5, seal=SEAL))
    frame[min(4 + at, len(frame) - 1)] ^= 1
    with connect(listener.port) as raw:
        raw.sendall(frame)
        assert _reply(raw) is None
    assert (heard, listener.ignored) == ([], 1)


def test_a_reply_cannot_be_used_as_a_request(listen, heard):
    listener = listen(SEAL)
    with connect(listener.port) as raw:
        raw.sendall(pack(HELLO, seal=SEAL, purpose=Purpose.REPLY))
        assert _reply(raw) is None
    assert heard == []


def test_a_forged_message_does_not_use_up_anybodys_numbers(listen):
    listener = listen(SEAL)
    with connect(listener.port) as raw:
        raw.sendall(pack(HELLO, number=(1 << 64) - 1, seal=OTHER) + pack(HELLO, number=0, seal=SEAL))
        assert _reply(raw).number == 0


def test_remembered_senders_are_bounded_and_forgotten_oldest_first(listen, monkeypatch):
    monkeypatch.setattr(module, "MAX_SENDERS", 2)
    listener = listen(SEAL)
    one, two, three = (bytes([number]) * 16 for number in (1, 2, 3))
    with connect(listener.port) as raw:
        for sender, number, answered in [
            (one, 1, 1),
            (two, 1, 1),
            (one, 2, 1),
            (three, 1, 1),
            (one, 2, 0),
            (two, 1, 1),
        ]:
            raw.sendall(pack(HELLO, number, sender, SEAL))
            assert (_reply(raw) is not None) == bool(answered)


class FakeProducer:
    """Answers each frame with whatever ``answer`` makes of it."""

    def __init__(self, answer):
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._run, args=(answer,), daemon=True)
        self._thread.start()

    def _run(self, answer):
        sock, _ = self._server.accept()
        sock.settimeout(DEADLINE_S)
        frames = Frames(sock)
        with sock, contextlib.suppress(OSError):
            while True:
                sock.sendall(answer(frames.next()))

    def close(self):
        self._server.close()
        self._thread.join(DEADLINE_S)


FORGERIES = {
    "unsigned": lambda frame: pack(Released(), frame.number, frame.sender, Seal(), Purpose.REPLY),
    "other secret": lambda frame: pack(Released(), frame.number, frame.sender, OTHER, Purpose.REPLY),
    "reflected": lambda frame: pack(frame.body, frame.number, frame.sender, SEAL, Purpose.REQUEST),
    "another number": lambda frame: pack(Released(), frame.number + 1, frame.sender, SEAL, Purpose.REPLY),
    "another sender": lambda frame: pack(Released(), frame.number, b"x" * 16, SEAL, Purpose.REPLY),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_reply_that_is_not_signed_for_its_request_is_no_reply(make_client, forgery):
    producer, client = FakeProducer(FORGERIES[forgery]), make_client(SEAL)
    assert ask(client, producer.port, HELLO, SILENCE_S) is None
    assert client.ignored == (forgery in ("unsigned", "other secret", "reflected"))
    client.close()
    producer.close()


def test_a_replayed_reply_answers_no_other_request(make_client):
    first = []

    def answer(frame):
        first.append(pack(Gone("first"), frame.number, frame.sender, SEAL, Purpose.REPLY))
        return first[0]

    producer, client = FakeProducer(answer), make_client(SEAL)
    assert ask(client, producer.port, HELLO) == Gone("first")
    assert ask(client, producer.port, HELLO, SILENCE_S) is None
    client.close()
    producer.close()


def test_one_producer_cannot_answer_for_another(make_client):
    """Numbers count up, so a producer that was asked knows those of requests to others."""
    client, quiet, asked = make_client(), threading.Event(), Replies()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client.send(silent.getsockname(), HELLO, 1.0, asked)

        def answer(frame):
            quiet.set()
            return pack(Gone("forged"), frame.number - 1, frame.sender, Seal(), Purpose.REPLY)

        producer = FakeProducer(answer)
        client.send(("127.0.0.1", producer.port), HELLO, 0.5, Replies())
        assert quiet.wait(DEADLINE_S)
        assert asked.wait() == [None]
        client.close()
        producer.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_without_a_secret_loopback_is_served(listen, make_client, host):
    assert ask(make_client(), listen(Seal(), host=host).port, HELLO, host=host) == Released()


class PublicPeers(socket.socket):
    """A listening socket whose peers seem to come from elsewhere: there is no public network in a test."""

    ADDRESS = ""

    def accept(self):
        return super().accept()[0], (self.ADDRESS, 40_000)


@pytest.mark.parametrize("address", ["8.8.8.8", "2001:4860::1", "::ffff:8.8.8.8"])
def test_without_a_secret_a_public_peer_is_turned_away(listen, heard, address, monkeypatch):
    bind = module.bind
    monkeypatch.setattr(module, "bind", lambda host, port: PublicPeers(fileno=bind(host, port).detach()))
    monkeypatch.setattr(PublicPeers, "ADDRESS", address)
    for seal, served in ((Seal(), False), (Seal(allow_public=True), True), (SEAL, True)):
        listener = listen(seal)
        with connect(listener.port) as raw:
            raw.sendall(pack(HELLO, seal=seal))
            assert _reply(raw) is not None if served else closed_by_peer(raw)
        assert listener.ignored == (not served)
    assert len(heard) == 2


def test_a_renewal_of_many_claims_is_signed_as_a_whole(listen, make_client, heard):
    message = Renew(TOKEN, [(f"request-{number}", TOKEN) for number in range(10_000)])
    assert ask(make_client(SEAL), listen(SEAL).port, message) == Released()
    assert heard == [message]
