"""The producer's state machine: I2, I5, I6 and I8 of the design, by example."""

import pytest

from kvferry.protocol.grants import Grants
from kvferry.protocol.messages import (
    Gone,
    Granted,
    Held,
    Hello,
    Released,
    Renew,
    Renewed,
)

from .granting import BLOCKS, HASH, INCARNATION, LEASE, STRANGER, ack_of, claim_of, release_of


def test_a_claim_is_answered_with_the_blocks_and_the_remaining_time(grants):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    assert grants.answer(claim_of(grant)) == Granted(BLOCKS, 40, LEASE, ready=40)


def test_blocks_are_freed_once_after_the_last_reader_acknowledged(grants):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    grants.answer(claim_of(grant))
    assert grants.answer(ack_of(grant, "pp0tp0")) == Held()
    assert grants.take_ended() == []
    assert grants.answer(ack_of(grant, "pp1tp0")) == Held()
    assert grants.take_ended() == ["r"]
    assert grants.take_ended() == []


def test_the_same_reader_counts_once(grants):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    grants.answer(claim_of(grant))
    assert grants.answer(ack_of(grant, "pp0tp0")) == Held()
    assert isinstance(grants.answer(ack_of(grant, "pp0tp0")), Gone)
    assert grants.take_ended() == []


def test_a_reader_that_was_not_announced_changes_nothing(grants):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    grants.answer(claim_of(grant))
    assert isinstance(grants.answer(ack_of(grant, "pp7tp7")), Gone)
    assert grants.take_ended() == []


def test_an_acknowledgement_without_a_claim_is_gone(grants):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    assert isinstance(grants.answer(ack_of(grant, "pp0tp0")), Gone)


def test_a_replayed_claim_after_the_end_is_gone(grants):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    grants.answer(claim_of(grant, readers=["pp0tp0"]))
    grants.answer(ack_of(grant, "pp0tp0"))
    assert isinstance(grants.answer(claim_of(grant, claim="d" * 32)), Gone)


def test_a_repeated_claim_message_is_answered_again_and_counts_once(grants):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    grants.answer(claim_of(grant))
    grants.answer(ack_of(grant, "pp0tp0"))
    assert isinstance(grants.answer(claim_of(grant)), Granted)
    grants.answer(ack_of(grant, "pp1tp0"))
    assert grants.take_ended() == ["r"]


@pytest.mark.parametrize("end", [release_of, lambda grant: ack_of(grant, "pp0tp0")], ids=["released", "acknowledged"])
def test_a_late_copy_of_a_claim_that_has_ended_is_gone_while_another_one_holds_the_grant(grants, end):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    for claim in ("c" * 32, "d" * 32):
        grants.answer(claim_of(grant, claim=claim, readers=["pp0tp0"]))
    grants.answer(end(grant))
    assert isinstance(grants.answer(claim_of(grant, readers=["pp0tp0"])), Gone)
    assert grants.answer(Renew(INCARNATION, [("r", "c" * 32)])).gone == ["c" * 32]
    assert grants.answer(ack_of(grant, "pp0tp0", "d" * 32)) == Held()
    assert grants.take_ended() == ["r"]


def test_a_claim_that_its_release_has_overtaken_is_gone(grants):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    grants.answer(claim_of(grant, claim="d" * 32))
    grants.answer(release_of(grant))
    assert isinstance(grants.answer(claim_of(grant)), Gone)


def test_a_forged_nonce_is_gone_and_changes_nothing(grants):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    assert isinstance(grants.answer(claim_of(grant, nonce="f" * 32)), Gone)
    assert isinstance(grants.answer(claim_of(grant)), Granted)


def test_a_second_consumer_is_gone_while_the_first_one_reads(grants):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    grants.answer(claim_of(grant))
    assert isinstance(grants.answer(claim_of(grant, claim="d" * 32, consumer=STRANGER)), Gone)
    assert grants.answer(ack_of(grant, "pp0tp0")) == Held()


def test_a_message_for_an_earlier_incarnation_is_gone(grants):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    assert "incarnation" in grants.answer(claim_of(grant, incarnation=STRANGER)).reason


def test_requests_of_one_consumer_share_a_grant_by_count(grants):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    for claim in ("c" * 32, "d" * 32):
        assert isinstance(grants.answer(claim_of(grant, claim=claim, readers=["pp0tp0"])), Granted)
    assert grants.answer(ack_of(grant, "pp0tp0", "c" * 32)) == Held()
    assert grants.take_ended() == []
    assert grants.answer(ack_of(grant, "pp0tp0", "d" * 32)) == Held()
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
    grants.answer(claim_of(grant))
    clock.now += LEASE
    grants.expire()
    assert grants.take_ended() == ["r"]


def test_an_acknowledgement_after_the_lease_is_gone_even_before_anyone_looked(grants, clock):
    """I2: the answer must not depend on whether the expiry thread ran first."""
    grant = grants.offer("r", BLOCKS, 40, HASH)
    grants.answer(claim_of(grant))
    clock.now += LEASE
    assert isinstance(grants.answer(ack_of(grant, "pp0tp0")), Gone)
    assert grants.take_ended() == ["r"]


def test_claims_on_one_grant_are_bounded(grants, monkeypatch):
    monkeypatch.setattr("kvferry.protocol.grants.MAX_CLAIMS", 2)
    grant = grants.offer("r", BLOCKS, 40, HASH)
    replies = [grants.answer(claim_of(grant, claim=claim * 32)) for claim in "cdec"]
    assert [isinstance(reply, Granted) for reply in replies] == [True, True, False, True]


def test_how_much_of_a_lease_was_left_is_told_at_each_end(clock):
    ends = []
    grants = Grants(INCARNATION, LEASE, clock, ends.append)
    read, released, _ = (grants.offer(name, BLOCKS, 40, HASH) for name in ("read", "released", "expired"))
    grants.answer(claim_of(read))
    clock.now += 10
    grants.answer(ack_of(read, "pp0tp0"))
    assert ends == []
    grants.answer(ack_of(read, "pp1tp0"))
    grants.answer(release_of(released))
    clock.now += LEASE
    grants.expire()
    assert ends == [LEASE - 10, LEASE - 10, None]


def test_blocks_are_counted_while_they_are_held_and_null_blocks_never(grants, clock):
    grants.offer("r", [[0, 0, 3], [1, 5]], 40, HASH)
    second = grants.offer("s", [[3, 1, 4]], 40, HASH)
    assert grants.held_blocks == 6
    grants.answer(release_of(second))
    assert grants.held_blocks == 3
    clock.now += LEASE
    grants.expire()
    assert grants.held_blocks == 0


def test_leases_end_in_the_order_they_were_last_prolonged(grants, clock):
    first, _ = grants.offer("first", BLOCKS, 40, HASH), grants.offer("second", BLOCKS, 40, HASH)
    clock.now += LEASE / 2
    grants.answer(claim_of(first))
    clock.now += LEASE / 2
    assert grants.expire() == pytest.approx(LEASE / 2)
    assert grants.take_ended() == ["second"]
    clock.now += LEASE / 2
    assert grants.expire() is None
    assert grants.take_ended() == ["first"]


def test_renewal_keeps_a_claim_for_another_lease(grants, clock):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    grants.answer(claim_of(grant))
    for _ in range(5):
        clock.now += LEASE / 3
        assert grants.answer(Renew(INCARNATION, [("r", "c" * 32)])) == Renewed([])
    assert grants.answer(ack_of(grant, "pp0tp0")) == Held()


def test_renewal_names_the_claims_that_are_gone(grants):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    grants.answer(claim_of(grant))
    renewal = Renew(INCARNATION, [("r", "c" * 32), ("r", "d" * 32), ("q", "e" * 32)])
    assert grants.answer(renewal) == Renewed(["d" * 32, "e" * 32])


def test_release_frees_an_unclaimed_grant_at_once(grants):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    assert grants.answer(release_of(grant)) == Released()
    assert grants.take_ended() == ["r"]


def test_release_frees_a_claimed_grant_at_once(grants):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    grants.answer(claim_of(grant))
    grants.answer(release_of(grant))
    assert grants.take_ended() == ["r"]


def test_release_of_one_claim_leaves_another_ones_blocks(grants):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    for claim in ("c" * 32, "d" * 32):
        grants.answer(claim_of(grant, claim=claim))
    grants.answer(release_of(grant, claim="c" * 32))
    assert grants.take_ended() == []


@pytest.mark.parametrize("change", [{"nonce": "f" * 32}, {"claim": "f" * 32}])
def test_a_foreign_release_frees_nothing_while_someone_reads(grants, change):
    grant = grants.offer("r", BLOCKS, 40, HASH)
    grants.answer(claim_of(grant))
    assert grants.answer(release_of(grant, **change)) == Released()
    assert grants.take_ended() == []


def test_hello_is_not_for_the_grants(grants):
    assert isinstance(grants.answer(Hello(INCARNATION)), Gone)
