"""The corpus, whole and mutated: a message is answered or refused as one, and grants stay what they were."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.errors import MessageError
from kvferry.protocol.authentication import Purpose, Seal
from kvferry.protocol.grants import Grants
from kvferry.protocol.messages import Hello, Release, Released, decode_reply, decode_request, encode
from kvferry.sidechannel.frames import header
from kvferry.sidechannel.server import Listener

from .peers import DEADLINE_S, TOKEN, Frames, connect, pack

CORPUS = {path.stem: path.read_bytes() for path in sorted(Path(__file__).with_name("corpus").glob("*.msgpack"))}
SENDER = b"f" * 16


def _make_grants():
    grants = Grants(TOKEN, 30.0, lambda: 0.0)
    grants.offer("cmpl-1", [[1, 2]], 20, TOKEN)
    return grants


def _answer(grants, body):
    """What the listener does with a body; None where it is no message."""
    try:
        message = decode_request(body)
    except MessageError as error:
        if len(str(error)) > 1000:
            pytest.fail("too long for a log")
        return None
    return decode_reply(encode(grants.answer(message)))


@st.composite
def _mutated(draw):
    """A file of the corpus with bytes flipped, cut out, put in, or another file grafted on."""
    files = st.sampled_from(list(CORPUS.values()))
    body = bytearray(draw(files))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(body)))
        match draw(st.sampled_from(["flip", "cut", "insert", "splice", "repeat"])):
            case "flip" if at < len(body):
                body[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del body[at : at + draw(st.integers(1, 40))]
            case "insert":
                body[at:at] = draw(st.binary(min_size=1, max_size=8))
            case "splice":
                other = draw(files)
                body[at:] = other[draw(st.integers(0, len(other))) :]
            case "repeat":
                body[at:at] = body[at : at + 64] * draw(st.integers(1, 20))
    return bytes(body)


@pytest.mark.parametrize("body", CORPUS.values(), ids=CORPUS)
def test_every_file_of_the_corpus_is_answered_or_refused(body):
    _answer(_make_grants(), body)


def test_the_corpus_holds_messages_of_every_kind_and_many_that_are_none():
    kinds = {type(_answer(_make_grants(), body)).__name__ for body in CORPUS.values()}
    assert kinds >= {"NoneType", "Gone", "Renewed", "Released"}


@settings(max_examples=1500, deadline=None)
@given(_mutated())
def test_a_mutated_message_is_answered_or_refused_and_ends_no_grant_it_does_not_name(body):
    grants = _make_grants()
    held = grants.offer("held", [[3]], 5, TOKEN)
    _answer(grants, body)
    assert len(grants) in (1, 2)
    claim = Release(TOKEN, "held", held.nonce, TOKEN)
    assert grants.answer(claim) == Released()
    assert "held" in grants.take_ended()


@settings(max_examples=500, deadline=None)
@given(_mutated())
@example(b"")
def test_a_mutated_message_is_no_reply_or_a_valid_one(body):
    try:
        reply = decode_reply(body)
    except MessageError:
        return
    assert decode_reply(encode(reply)) == reply


@pytest.fixture(scope="module")
def served():
    """A listener with grants behind it, and a second one whose answers show that a connection still works."""
    listener = Listener("127.0.0.1", 0, lambda message, _: encode(_make_grants().answer(message)), lambda: None)
    yield listener
    listener.close()


def _exchange(port, data):
    """Send ``data`` and then a valid frame; whether the latter was answered or the connection closed."""
    with connect(port) as raw:
        frames = Frames(raw)
        raw.settimeout(DEADLINE_S)
        try:
            raw.sendall(data + pack(Hello(TOKEN), number=77, sender=SENDER))
            raw.shutdown(1)
            while frames.next().number != 77:
                pass
        except (ConnectionError, MessageError):
            return False
        return True


@settings(max_examples=150, deadline=None)
@given(st.lists(_mutated(), min_size=1, max_size=3))
def test_mutated_bodies_in_good_frames_leave_the_connection_in_step(served, bodies):
    assert _exchange(served.port, b"".join(pack(body, sender=SENDER) for body in bodies))


@settings(max_examples=150, deadline=None)
@given(_mutated(), st.data())
def test_mutated_frames_are_answered_ignored_or_end_their_connection(served, body, data):
    frame = bytearray(header(Seal(), Purpose.REQUEST, SENDER, 1, body) + body)
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= 1 << data.draw(st.integers(0, 7))
    _exchange(served.port, bytes(frame[data.draw(st.integers(0, 10)) :]))
    assert _exchange(served.port, b"")
