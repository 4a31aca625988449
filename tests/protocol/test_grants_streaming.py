"""Grants of prompts that move while they are computed."""

import msgspec
import pytest

from kvferry.protocol import grants as module
from kvferry.protocol.messages import (
    WAIT_S,
    Ack,
    Claim,
    Follow,
    Gone,
    Granted,
    Held,
    Release,
    Released,
    Renew,
    Renewed,
    Transfer,
    Waiting,
)

from .granting import BLOCKS, CONSUMER, HASH, INCARNATION, LEASE, READERS, STRANGER

TRANSFER = Transfer("7" * 32, "8" * 32)


def _ahead(claim="c" * 32, token_hash=HASH, nonce=TRANSFER.nonce):
    return Claim(INCARNATION, TRANSFER.name, nonce, claim, CONSUMER, READERS, 40, token_hash, ahead=True)


def _follow(reader=READERS[0], life=0, ready=0, claim="c" * 32):
    return Follow(INCARNATION, TRANSFER.name, claim, reader, life, ready)


@pytest.fixture
def opened(grants):
    assert grants.open("r", TRANSFER, 40, HASH)
    return grants


@pytest.fixture
def later():
    return []


def test_a_claim_may_come_before_its_request_and_is_answered_when_that_has_begun(grants, later):
    assert grants.answer(_ahead(), later.append) is None
    grants.open("r", TRANSFER, 40, HASH)
    assert later == [], "nothing can be read yet"
    grants.progress("r", 0, [[3], [1]], 0)
    assert later == [Granted([[3], [1]], 40, LEASE, ready=0)]


def test_a_claim_that_waits_is_told_in_time_whether_its_request_is_known(grants, clock, later):
    grants.answer(_ahead(), later.append)
    assert grants.expire() == pytest.approx(WAIT_S)
    clock.now += WAIT_S
    grants.expire()
    grants.open("r", TRANSFER, 40, HASH)
    grants.answer(_ahead(), later.append)
    clock.now += WAIT_S
    grants.expire()
    assert later == [Waiting(known=False), Waiting(known=True)]


def test_what_is_made_up_fills_no_memory(grants, later, monkeypatch):
    large = msgspec.structs.replace(_ahead(), readers=["r" * 500] * 100)
    assert grants.answer(large, later.append) == Waiting(known=False), "too large to be kept"
    monkeypatch.setattr(module, "MAX_KEPT", 2)
    claims = [_ahead(claim=f"{number:032x}") for number in range(3)]
    assert [grants.answer(claim, later.append) for claim in claims] == [None, None, Waiting(known=False)]
    for number in range(2 * module.MAX_GIVEN_UP_CLAIMS):
        grants.answer(Release(INCARNATION, TRANSFER.name, TRANSFER.nonce, f"{number:032x}"))
    assert sum(map(len, grants._given_up.values())) == module.MAX_GIVEN_UP_CLAIMS


def test_an_ordinary_claim_never_waits(grants, later):
    unknown = Claim(INCARNATION, "r", "8" * 32, "c" * 32, CONSUMER, READERS, 40, HASH)
    assert isinstance(grants.answer(unknown, later.append), Gone)


def test_a_claim_for_another_prompt_is_gone_and_says_so(opened):
    opened.progress("r", 0, BLOCKS, 16)
    assert "another prompt" in opened.answer(_ahead(token_hash="b" * 32)).reason
    assert isinstance(opened.answer(_ahead()), Granted)


def test_a_reader_hears_of_progress_when_there_is_some_and_of_the_end(opened, later):
    opened.progress("r", 0, [[3], [1]], 0)
    opened.answer(_ahead())
    assert opened.answer(_follow(), later.append) is None
    opened.progress("r", 0, [[3, 1], [1]], 16)
    assert later.pop() == Granted([[3, 1], [1]], 40, LEASE, ready=16)
    assert opened.answer(_follow(ready=16), later.append) is None
    opened.offer("r", BLOCKS, 40, HASH)
    assert later.pop() == Granted(BLOCKS, 40, LEASE, ready=40)
    assert [opened.answer(Ack(INCARNATION, TRANSFER.name, "c" * 32, reader)) for reader in READERS] == [Held(), Held()]
    assert opened.take_ended() == ["r"]


def test_a_reader_without_news_is_told_so_in_time(opened, clock, later):
    opened.progress("r", 0, BLOCKS, 16)
    opened.answer(_ahead())
    opened.answer(_follow(ready=16), later.append)
    clock.now += WAIT_S
    opened.expire()
    assert [(reply.ready, reply.complete) for reply in later] == [(16, False)]


def test_asking_again_takes_the_place_of_what_was_asked(opened, later):
    opened.progress("r", 0, BLOCKS, 16)
    opened.answer(_ahead())
    opened.answer(_follow(ready=16), later.append)
    opened.answer(_follow(ready=16), later.append)
    assert len(later) == 1
    opened.progress("r", 0, BLOCKS, 32)
    assert [reply.ready for reply in later] == [16, 32]


def test_who_has_not_claimed_cannot_follow(opened):
    opened.progress("r", 0, BLOCKS, 16)
    assert isinstance(opened.answer(_follow()), Gone)
    opened.answer(_ahead())
    assert isinstance(opened.answer(_follow(reader="pp9tp9")), Gone)


def test_the_last_token_is_not_ready_before_the_prefill_has_ended(opened):
    opened.progress("r", 0, BLOCKS, 40)
    assert opened.answer(_ahead()).ready == 39


def test_a_prefill_that_lost_its_blocks_begins_a_new_life(opened, later):
    opened.progress("r", 0, BLOCKS, 32)
    opened.answer(_ahead())
    opened.answer(_follow(ready=32), later.append)
    opened.progress("r", 1, [], 0)
    assert [(reply.life, reply.ready) for reply in later] == [(1, 0)]
    opened.progress("r", 0, BLOCKS, 39)
    assert opened.answer(_follow(life=0, ready=32)).life == 1, "news of an earlier life came late"


def test_acknowledging_an_open_prefill_gives_up_and_vouches_for_nothing(opened):
    opened.progress("r", 0, BLOCKS, 32)
    opened.answer(_ahead())
    for reader in READERS:
        assert opened.answer(Ack(INCARNATION, TRANSFER.name, "c" * 32, reader)) == Released()
    opened.offer("r", BLOCKS, 40, HASH)
    assert opened.take_ended() == ["r"], "nobody is left to read it"


@pytest.mark.parametrize("incarnation", [INCARNATION, STRANGER], ids=["this", "an earlier one"])
@pytest.mark.parametrize("when", ["before it arrives", "while it goes on", "afterwards"])
def test_a_prefill_that_was_given_up_ends_at_once(grants, when, incarnation):
    """Also if it was sent to an engine that had been started anew, of which whoever gives it up has not heard yet."""
    release = Release(incarnation, TRANSFER.name, TRANSFER.nonce, "c" * 32)
    for moment, step in (
        ("before it arrives", lambda: grants.open("r", TRANSFER, 40, HASH)),
        ("while it goes on", lambda: grants.offer("r", BLOCKS, 40, HASH)),
        ("afterwards", lambda: None),
    ):
        if moment == when:
            assert grants.answer(release) == Released()
        step()
    assert grants.take_ended() == ["r"]


def test_a_prefill_that_fails_ends_what_follows_it(opened, later):
    opened.progress("r", 0, BLOCKS, 16)
    opened.answer(_ahead())
    opened.answer(_follow(ready=16), later.append)
    opened.close("r")
    assert isinstance(later.pop(), Gone)
    assert isinstance(opened.answer(_follow()), Gone)
    assert opened.take_ended() == []


def test_an_open_prefill_outlives_any_lease_and_can_be_renewed(opened, clock):
    opened.progress("r", 0, BLOCKS, 16)
    opened.answer(_ahead())
    clock.now += 10 * LEASE
    assert opened.answer(Renew(INCARNATION, [(TRANSFER.name, "c" * 32)])) == Renewed([])
    assert opened.answer(_follow()).ready == 16
    opened.offer("r", BLOCKS, 40, HASH)
    clock.now += LEASE
    assert isinstance(opened.answer(_follow()), Gone)
    assert opened.take_ended() == ["r"]


def test_a_name_that_is_taken_is_not_opened_again(opened):
    assert not opened.open("other", TRANSFER, 40, HASH)
    opened.close("other")
    opened.progress("r", 0, BLOCKS, 16)
    assert isinstance(opened.answer(_ahead()), Granted)


def test_a_prefill_that_ended_with_other_tokens_than_it_promised_is_not_held_for_who_claimed_it(opened, later):
    opened.progress("r", 0, BLOCKS, 16)
    opened.answer(_ahead())
    opened.answer(_follow(ready=16), later.append)
    opened.offer("r", BLOCKS, 39, "b" * 32)
    assert isinstance(later.pop(), Gone)
    assert opened.take_ended() == ["r"]
