"""The consumer's state machine: when a request waits, loads, or is computed locally."""

import pytest

from kvferry.geometry import Span
from kvferry.protocol.identity import draw
from kvferry.protocol.loads import Loads
from kvferry.protocol.messages import Gone, Granted, Held, Offer, Release, Renew, Renewed, Waiting

TOKEN, OTHER, CONSUMER = "1" * 32, "2" * 32, "3" * 32
TIMEOUT, HOLD, TTL = 10.0, 300.0, 30.0
ADDRESS = ("10.0.0.7", 5601)
GRANTED = Granted([[3, 4, 5]], 300, TTL, ready=300)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def _make_offer(request="p-1", host=ADDRESS[0], incarnation=TOKEN, tokens=300):
    return Offer(host, ADDRESS[1], "prefill", request, incarnation, OTHER, tokens, TOKEN if tokens else None)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def loads(clock):
    return Loads(CONSUMER, ["pp0tp0", "pp1tp0"], TIMEOUT, HOLD, clock)


def _begin(loads, request, offer, tokens, token_hash):
    return loads.begin(loads.expect(request), offer, draw(), tokens, token_hash)


def _granted(loads, name="d-1", **offer):
    claim = _begin(loads, name, _make_offer(**offer), 300, TOKEN)
    loads.claimed(name, claim.claim, GRANTED)
    return claim


def test_a_claim_names_the_offer_and_every_reader(loads):
    claim = _begin(loads, "d-1", _make_offer(), 300, TOKEN)
    assert (claim.incarnation, claim.request, claim.nonce, claim.consumer) == (TOKEN, "p-1", OTHER, CONSUMER)
    assert claim.readers == ["pp0tp0", "pp1tp0"]


def test_each_request_claims_under_a_name_of_its_own(loads):
    assert (
        _begin(loads, "d-1", _make_offer(), 300, TOKEN).claim != _begin(loads, "d-2", _make_offer(), 300, TOKEN).claim
    )


def test_a_request_waits_until_the_producer_answers(loads):
    claim = _begin(loads, "d-1", _make_offer(), 300, TOKEN)
    assert loads.available("d-1") is None
    assert loads.claimed("d-1", claim.claim, GRANTED) is None
    assert loads.available("d-1") == 300


def test_a_request_waits_while_its_offer_is_read(loads):
    expected = loads.expect("d-1")
    assert loads.available("d-1") is None
    loads.settle(expected)
    assert loads.available("d-1") == 0


def test_a_request_whose_offer_is_not_read_in_time_is_late_and_never_claims(loads, clock):
    expected = loads.expect("d-1")
    assert loads.lost("d-1") is None
    clock.now += TIMEOUT
    assert loads.available("d-1") == 0
    assert loads.lost("d-1") == "late"
    assert loads.drop("d-1") is None
    assert loads.begin(expected, _make_offer(), draw(), 300, TOKEN) is None
    assert loads.available("d-1") == 0
    assert len(loads) == 0


def test_reading_an_offer_is_part_of_the_time_that_a_request_waits_for_an_answer(loads, clock):
    expected = loads.expect("d-1")
    clock.now += TIMEOUT / 2
    assert loads.begin(expected, _make_offer(), draw(), 300, TOKEN)
    clock.now += TIMEOUT / 2
    assert loads.available("d-1") == 0


def test_a_request_without_an_offer_has_nothing_to_load(loads):
    assert loads.available("d-1") == 0


@pytest.mark.parametrize("reply", [Gone("released"), None, Held(), Granted([[3]], 299, TTL, ready=299)])
def test_any_answer_but_a_full_grant_means_local_prefill(loads, reply):
    claim = _begin(loads, "d-1", _make_offer(), 300, TOKEN)
    assert loads.claimed("d-1", claim.claim, reply)
    assert loads.available("d-1") == 0
    assert len(loads) == 0


def test_a_request_stops_waiting_at_its_deadline(loads, clock):
    _begin(loads, "d-1", _make_offer(), 300, TOKEN)
    clock.now += TIMEOUT
    assert loads.available("d-1") == 0


def test_an_order_carries_both_block_lists_and_the_tokens_to_read(loads):
    claim = _granted(loads)
    order = loads.start("d-1", [[7, 8, 9]], Span(128, 300))
    assert (order.request, order.remote_request, order.address, order.claim) == ("d-1", "p-1", ADDRESS, claim.claim)
    assert (order.grant, order.local_blocks) == (GRANTED, [[7, 8, 9]])
    assert (order.first_token, order.last_token) == (128, 300)


def test_a_load_is_ordered_once(loads):
    _granted(loads)
    assert loads.start("d-1", [[7]], Span(0, 300))
    assert loads.start("d-1", [[7]], Span(0, 300)) is None


def test_a_request_that_loads_or_has_loaded_never_asks_again(loads):
    _granted(loads)
    loads.start("d-1", [[7]], Span(0, 300))
    assert loads.available("d-1") == 0
    loads.finished("d-1")
    assert loads.available("d-1") == 0


def test_dropping_a_waiting_or_granted_request_releases_the_grant(loads):
    first = _begin(loads, "d-1", _make_offer(), 300, TOKEN)
    second = _granted(loads, "d-2")
    assert loads.drop("d-1") == (ADDRESS, Release(TOKEN, "p-1", OTHER, first.claim))
    assert loads.drop("d-2") == (ADDRESS, Release(TOKEN, "p-1", OTHER, second.claim))
    assert len(loads) == 0


def test_dropping_a_load_under_way_releases_nothing(loads):
    """Its workers still read; their acknowledgements end the grant."""
    _granted(loads)
    loads.start("d-1", [[7]], Span(0, 300))
    assert loads.drop("d-1") is None
    assert len(loads) == 1


def test_an_answer_after_the_request_was_dropped_is_ignored(loads):
    claim = _begin(loads, "d-1", _make_offer(), 300, TOKEN)
    loads.drop("d-1")
    assert loads.claimed("d-1", claim.claim, GRANTED) is None
    assert loads.available("d-1") == 0


def test_a_request_under_the_name_of_one_that_was_dropped_is_another(loads):
    """With VLLM_DISABLE_REQUEST_ID_RANDOMIZATION names are the clients', who may use them again."""
    expected = loads.expect("d-1")
    loads.drop("d-1")
    again = loads.expect("d-1")
    assert loads.begin(expected, _make_offer("p-1"), draw(), 300, TOKEN) is None
    loads.settle(expected)
    earlier = loads.begin(again, _make_offer("p-2"), draw(), 300, TOKEN)
    loads.drop("d-1")
    claim = _begin(loads, "d-1", _make_offer("p-3"), 300, TOKEN)
    assert loads.claimed("d-1", earlier.claim, GRANTED) is None
    assert loads.unanswered("d-1", earlier.claim) is None
    assert loads.available("d-1") is None
    assert loads.unanswered("d-1", claim.claim) == (ADDRESS, Release(TOKEN, "p-3", OTHER, claim.claim))
    assert loads.available("d-1") == 0


def test_renewals_are_due_every_third_of_the_lease_and_batched_by_producer(loads, clock):
    claims = [_granted(loads, f"d-{i}", request=f"p-{i}").claim for i in range(2)]
    other = _granted(loads, "d-9", host="10.0.0.8", incarnation=OTHER)
    assert loads.due() == []
    assert loads.next_due() == pytest.approx(TTL / 3)
    clock.now += TTL / 3
    assert loads.due() == [
        (ADDRESS, Renew(TOKEN, [("p-0", claims[0]), ("p-1", claims[1])])),
        (("10.0.0.8", 5601), Renew(OTHER, [("p-1", other.claim)])),
    ]
    assert loads.due() == []


def test_a_load_under_way_is_renewed_until_every_worker_reported(loads, clock):
    _granted(loads)
    loads.start("d-1", [[7]], Span(0, 300))
    clock.now += TTL / 3
    assert len(loads.due()) == 1
    loads.finished("d-1")
    clock.now += TTL
    assert loads.due() == []
    assert loads.next_due() is None


def test_a_grant_that_the_producer_lost_is_not_loaded(loads):
    claim = _granted(loads)
    loads.renewed(Renewed([claim.claim]))
    assert loads.available("d-1") == 0


def test_a_grant_lost_between_counting_and_allocation_is_ordered_all_the_same(loads):
    """The scheduler then waits for the workers' report; without an order it would wait for ever."""
    claim = _granted(loads)
    assert loads.available("d-1") == 300
    loads.renewed(Renewed([claim.claim]))
    assert loads.start("d-1", [[7]], Span(0, 300)) is not None


def test_a_renewal_without_an_answer_changes_nothing(loads):
    _granted(loads)
    loads.renewed(None)
    assert loads.available("d-1") == 300


def test_a_grant_that_finds_no_blocks_in_time_is_given_back_and_computed_here(loads, clock):
    """Two full engines that each wait to load what the other holds would otherwise wait for ever."""
    claim = _granted(loads)
    clock.now += HOLD
    assert loads.next_due() == 0
    released = [message for _, message in loads.due() if isinstance(message, Release)]
    assert released == [Release(TOKEN, "p-1", OTHER, claim.claim)]
    assert loads.available("d-1") == 0
    assert loads.next_due() is None


def test_a_load_under_way_is_not_given_back(loads, clock):
    _granted(loads)
    loads.start("d-1", [[7]], Span(0, 300))
    clock.now += 2 * HOLD
    assert [type(message) for _, message in loads.due()] == [Renew]
    assert loads.next_due() == pytest.approx(TTL / 3)


# Transfers that stream


def _begin_streaming(loads):
    return _begin(loads, "d-1", _make_offer(tokens=None), 300, TOKEN)


def test_an_offer_that_streams_is_claimed_ahead_and_for_all_of_the_prompt(loads):
    claim = _begin_streaming(loads)
    assert (claim.ahead, claim.tokens, claim.token_hash) == (True, 300, TOKEN)
    assert not _begin(loads, "d-2", _make_offer(), 300, TOKEN).ahead


def test_a_request_waits_for_a_prefill_as_long_as_the_producer_has_it(loads, clock):
    claim = _begin_streaming(loads)
    for _ in range(5):
        clock.now += TIMEOUT - 1
        assert loads.claimed("d-1", claim.claim, Waiting(known=True)) == claim, "ask again"
        assert loads.available("d-1") is None
    clock.now += TIMEOUT
    assert loads.available("d-1") == 0


def test_a_request_does_not_wait_longer_than_its_deadline_for_a_prefill_that_nobody_knows(loads, clock):
    claim = _begin_streaming(loads)
    clock.now += TIMEOUT - 1
    assert loads.claimed("d-1", claim.claim, Waiting(known=False)) == claim
    clock.now += 1
    assert "did not come" in loads.claimed("d-1", claim.claim, Waiting(known=False))
    assert loads.available("d-1") == 0
    assert len(loads) == 0


def test_blocks_are_wanted_before_the_prefill_has_ended(loads):
    claim = _begin_streaming(loads)
    begun = Granted([[3]], 300, TTL, ready=0)
    assert loads.claimed("d-1", claim.claim, begun) is None
    assert loads.available("d-1") == 300
    assert loads.start("d-1", [[7, 8, 9]], Span(0, 300)).grant == begun


def test_giving_up_a_prefill_that_is_followed_tells_its_producer(loads):
    """Its workers follow it until the producer says that it is gone."""
    claim = _begin_streaming(loads)
    loads.claimed("d-1", claim.claim, Granted([[3]], 300, TTL, ready=0))
    loads.start("d-1", [[7, 8, 9]], Span(0, 300))
    assert loads.drop("d-1") == (ADDRESS, Release(TOKEN, "p-1", OTHER, claim.claim))
    assert len(loads) == 1
