"""The producer's state machine: I2, I5, I6 and I8 of the design, by example and by random histories."""

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from kvferry.protocol import grants as module
from kvferry.protocol.grants import Grants
from kvferry.protocol.identity import draw
from kvferry.protocol.messages import (
    WAIT_S,
    Ack,
    Claim,
    Follow,
    Gone,
    Granted,
    Held,
    Hello,
    Release,
    Released,
    Renew,
    Renewed,
    Transfer,
    Waiting,
)

LEASE = 30.0
INCARNATION, CONSUMER, STRANGER = "1" * 32, "2" * 32, "3" * 32
READERS = ["pp0tp0", "pp1tp0"]
BLOCKS = [[3, 1, 4], [1, 5]]
HASH = "a" * 32


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def grants(clock):
    return Grants(INCARNATION, LEASE, clock)


def _claim(grant, claim="c" * 32, consumer=CONSUMER, readers=READERS, nonce=None, incarnation=INCARNATION):
    names = (incarnation, grant.name, nonce or grant.nonce, claim, consumer)
    return Claim(*names, readers, grant.tokens, grant.token_hash)


def _ack(grant, reader, claim="c" * 32):
    return Ack(INCARNATION, grant.request, claim, reader)


def _release(grant, claim="c" * 32, nonce=None):
    return Release(INCARNATION, grant.request, nonce or grant.nonce, claim)


def test_a_claim_is_answered_with_the_blocks_and_the_remaining_time(grants):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    assert grants.answer(_claim(grant)) == Granted(BLOCKS, 40, LEASE, ready=40)


def test_blocks_are_freed_once_after_the_last_reader_acknowledged(grants):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    grants.answer(_claim(grant))
    assert grants.answer(_ack(grant, "pp0tp0")) == Held()
    assert grants.take_ended() == []
    assert grants.answer(_ack(grant, "pp1tp0")) == Held()
    assert grants.take_ended() == ["r"]
    assert grants.take_ended() == []


def test_the_same_reader_counts_once(grants):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    grants.answer(_claim(grant))
    assert grants.answer(_ack(grant, "pp0tp0")) == Held()
    assert isinstance(grants.answer(_ack(grant, "pp0tp0")), Gone)
    assert grants.take_ended() == []


def test_a_reader_that_was_not_announced_changes_nothing(grants):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    grants.answer(_claim(grant))
    assert isinstance(grants.answer(_ack(grant, "pp7tp7")), Gone)
    assert grants.take_ended() == []


def test_an_acknowledgement_without_a_claim_is_gone(grants):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    assert isinstance(grants.answer(_ack(grant, "pp0tp0")), Gone)


def test_a_replayed_claim_after_the_end_is_gone(grants):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    grants.answer(_claim(grant, readers=["pp0tp0"]))
    grants.answer(_ack(grant, "pp0tp0"))
    assert isinstance(grants.answer(_claim(grant, claim="d" * 32)), Gone)


def test_a_repeated_claim_message_is_answered_again_and_counts_once(grants):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    grants.answer(_claim(grant))
    grants.answer(_ack(grant, "pp0tp0"))
    assert isinstance(grants.answer(_claim(grant)), Granted)
    grants.answer(_ack(grant, "pp1tp0"))
    assert grants.take_ended() == ["r"]


@pytest.mark.parametrize("end", [_release, lambda grant: _ack(grant, "pp0tp0")], ids=["released", "acknowledged"])
def test_a_late_copy_of_a_claim_that_has_ended_is_gone_while_another_one_holds_the_grant(grants, end):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    for claim in ("c" * 32, "d" * 32):
        grants.answer(_claim(grant, claim=claim, readers=["pp0tp0"]))
    grants.answer(end(grant))
    assert isinstance(grants.answer(_claim(grant, readers=["pp0tp0"])), Gone)
    assert grants.answer(Renew(INCARNATION, [("r", "c" * 32)])).gone == ["c" * 32]
    assert grants.answer(_ack(grant, "pp0tp0", "d" * 32)) == Held()
    assert grants.take_ended() == ["r"]


def test_a_claim_that_its_release_has_overtaken_is_gone(grants):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    grants.answer(_claim(grant, claim="d" * 32))
    grants.answer(_release(grant))
    assert isinstance(grants.answer(_claim(grant)), Gone)


def test_a_forged_nonce_is_gone_and_changes_nothing(grants):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    assert isinstance(grants.answer(_claim(grant, nonce="f" * 32)), Gone)
    assert isinstance(grants.answer(_claim(grant)), Granted)


def test_a_second_consumer_is_gone_while_the_first_one_reads(grants):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    grants.answer(_claim(grant))
    assert isinstance(grants.answer(_claim(grant, claim="d" * 32, consumer=STRANGER)), Gone)
    assert grants.answer(_ack(grant, "pp0tp0")) == Held()


def test_a_message_for_an_earlier_incarnation_is_gone(grants):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    assert "incarnation" in grants.answer(_claim(grant, incarnation=STRANGER)).reason


def test_requests_of_one_consumer_share_a_grant_by_count(grants):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    for claim in ("c" * 32, "d" * 32):
        assert isinstance(grants.answer(_claim(grant, claim=claim, readers=["pp0tp0"])), Granted)
    assert grants.answer(_ack(grant, "pp0tp0", "c" * 32)) == Held()
    assert grants.take_ended() == []
    assert grants.answer(_ack(grant, "pp0tp0", "d" * 32)) == Held()
    assert grants.take_ended() == ["r"]


def test_an_unclaimed_grant_ends_with_its_lease(grants, clock):
    grants.offer("r", BLOCKS, 40, HASH)
    clock.now += LEASE - 0.01
    assert grants.expire() == pytest.approx(0.01)
    clock.now += 0.01
    assert grants.expire() is None
    assert grants.take_ended() == ["r"]


def test_a_consumer_that_died_after_its_claim_holds_nothing_past_the_lease(grants, clock):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    grants.answer(_claim(grant))
    clock.now += LEASE
    grants.expire()
    assert grants.take_ended() == ["r"]


def test_an_acknowledgement_after_the_lease_is_gone_even_before_anyone_looked(grants, clock):
    """I2: the answer must not depend on whether the expiry thread ran first."""
    grant = grants.offer("r", BLOCKS, 40, HASH)
    grants.answer(_claim(grant))
    clock.now += LEASE
    assert isinstance(grants.answer(_ack(grant, "pp0tp0")), Gone)
    assert grants.take_ended() == ["r"]


def test_claims_on_one_grant_are_bounded(grants, monkeypatch):
    monkeypatch.setattr("kvferry.protocol.grants.MAX_CLAIMS", 2)
    grant = grants.offer("r", BLOCKS, 40, HASH)
    replies = [grants.answer(_claim(grant, claim=claim * 32)) for claim in "cdec"]
    assert [isinstance(reply, Granted) for reply in replies] == [True, True, False, True]


def test_how_much_of_a_lease_was_left_is_told_at_each_end(clock):
    ends = []
    grants = Grants(INCARNATION, LEASE, clock, ends.append)
    read, released, _ = (grants.offer(name, BLOCKS, 40, HASH) for name in ("read", "released", "expired"))
    grants.answer(_claim(read))
    clock.now += 10
    grants.answer(_ack(read, "pp0tp0"))
    assert ends == []
    grants.answer(_ack(read, "pp1tp0"))
    grants.answer(_release(released))
    clock.now += LEASE
    grants.expire()
    assert ends == [LEASE - 10, LEASE - 10, None]


def test_blocks_are_counted_while_they_are_held_and_null_blocks_never(grants, clock):
    grants.offer("r", [[0, 0, 3], [1, 5]], 40, HASH)
    second = grants.offer("s", [[3, 1, 4]], 40, HASH)
    assert grants.held_blocks == 6
    grants.answer(_release(second))
    assert grants.held_blocks == 3
    clock.now += LEASE
    grants.expire()
    assert grants.held_blocks == 0


def test_leases_end_in_the_order_they_were_last_prolonged(grants, clock):
    first, _ = grants.offer("first", BLOCKS, 40, HASH), grants.offer("second", BLOCKS, 40, HASH)
    clock.now += LEASE / 2
    grants.answer(_claim(first))
    clock.now += LEASE / 2
    assert grants.expire() == pytest.approx(LEASE / 2)
    assert grants.take_ended() == ["second"]
    clock.now += LEASE / 2
    assert grants.expire() is None
    assert grants.take_ended() == ["first"]


def test_renewal_keeps_a_claim_for_another_lease(grants, clock):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    grants.answer(_claim(grant))
    for _ in range(5):
        clock.now += LEASE / 3
        assert grants.answer(Renew(INCARNATION, [("r", "c" * 32)])) == Renewed([])
    assert grants.answer(_ack(grant, "pp0tp0")) == Held()


def test_renewal_names_the_claims_that_are_gone(grants):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    grants.answer(_claim(grant))
    renewal = Renew(INCARNATION, [("r", "c" * 32), ("r", "d" * 32), ("q", "e" * 32)])
    assert grants.answer(renewal) == Renewed(["d" * 32, "e" * 32])


def test_release_frees_an_unclaimed_grant_at_once(grants):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    assert grants.answer(_release(grant)) == Released()
    assert grants.take_ended() == ["r"]


def test_release_frees_a_claimed_grant_at_once(grants):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    grants.answer(_claim(grant))
    grants.answer(_release(grant))
    assert grants.take_ended() == ["r"]


def test_release_of_one_claim_leaves_another_ones_blocks(grants):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    for claim in ("c" * 32, "d" * 32):
        grants.answer(_claim(grant, claim=claim))
    grants.answer(_release(grant, claim="c" * 32))
    assert grants.take_ended() == []


@pytest.mark.parametrize("change", [{"nonce": "f" * 32}, {"claim": "f" * 32}])
def test_a_foreign_release_frees_nothing_while_someone_reads(grants, change):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    grants.answer(_claim(grant))
    assert grants.answer(_release(grant, **change)) == Released()
    assert grants.take_ended() == []


def test_hello_is_not_for_the_grants(grants):
    assert isinstance(grants.answer(Hello(INCARNATION)), Gone)


# Transfers that stream

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


class GrantHistories(RuleBasedStateMachine):
    """Any interleaving of offers, claims, acknowledgements, renewals, releases and time."""

    offered = Bundle("offered")
    claims = st.sampled_from(["c" * 32, "d" * 32])

    @initialize()
    def start(self):
        self.clock = Clock()
        self.grants = Grants(INCARNATION, LEASE, self.clock)
        self.freed: list[str] = []
        self.alive_until: dict[str, float] = {}

    @rule(target=offered)
    def offer(self):
        request = draw()
        self.alive_until[request] = self.clock.now + LEASE
        return self.grants.offer(request, BLOCKS, 40, HASH)

    @rule(grant=offered, claim=claims, consumer=st.sampled_from([CONSUMER, STRANGER]))
    def claim(self, grant, claim, consumer):
        if isinstance(self.grants.answer(_claim(grant, claim, consumer)), Granted):
            self._must_be_alive(grant)
            self.alive_until[grant.request] = self.clock.now + LEASE

    @rule(grant=offered, claim=claims, reader=st.sampled_from([*READERS, "pp9tp9"]))
    def ack(self, grant, claim, reader):
        if self.grants.answer(_ack(grant, reader, claim)) == Held():
            self._must_be_alive(grant)

    @rule(grant=offered, claim=claims)
    def renew(self, grant, claim):
        if not self.grants.answer(Renew(INCARNATION, [(grant.request, claim)])).gone:
            self._must_be_alive(grant)
            self.alive_until[grant.request] = self.clock.now + LEASE

    @rule(grant=offered, claim=claims)
    def release(self, grant, claim):
        assert self.grants.answer(_release(grant, claim)) == Released()

    @rule(seconds=st.sampled_from([0.1, 9.9, 10.0, 29.9, 30.0, 31.0]))
    def pass_time(self, seconds):
        self.clock.now += seconds

    @rule()
    def expire(self):
        self.grants.expire()

    @rule()
    def free(self):
        self.freed += self.grants.take_ended()

    def _must_be_alive(self, grant):
        assert grant.request not in self.freed, "vouched for blocks that were freed"
        assert self.clock.now < self.alive_until[grant.request], "vouched for blocks past their lease"

    @invariant()
    def every_grant_is_freed_at_most_once(self):
        freed = [*self.freed, *self.grants._ended]
        assert len(freed) == len(set(freed))

    @invariant()
    def nothing_outlives_its_lease(self):
        self.grants.expire()
        freed = {*self.freed, *self.grants._ended}
        for request, until in self.alive_until.items():
            assert until > self.clock.now or request in freed


TestGrantHistories = GrantHistories.TestCase
TestGrantHistories.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
