"""Each safeguard of the protocol is needed: with any one of them off, the simulation fails soon."""

from contextlib import AbstractContextManager
from unittest.mock import patch

import msgspec
import pytest

from kvferry.protocol.grants import GONE, Grants
from kvferry.protocol.loads import Loads
from kvferry.protocol.messages import Granted, Held, Released
from kvferry.transport.reader import Reader
from kvferry.vllm.progress import Progress

from . import engine, invariants, worker
from .seeds import attempt

SEEDS = 1000


def claims_are_not_checked() -> AbstractContextManager:
    """Whoever claims a grant gets it, also after somebody else."""

    def claim(self, message):
        grant = self._find(message.request)
        if grant is None or grant.nonce != message.nonce or grant.blocks is None:
            return GONE
        grant.consumer = message.consumer
        grant.waiting.setdefault(message.claim, set(message.readers))
        self._prolong(grant)
        return self._granted(grant, grant.blocks)

    return patch.object(Grants, "_claim", claim)


def nonces_are_not_checked() -> AbstractContextManager:
    """It is enough to guess the name of a request."""
    original = Grants._claim

    def claim(self, message):
        grant = self._find(message.request)
        return original(self, msgspec.structs.replace(message, nonce=grant.nonce) if grant else message)

    return patch.object(Grants, "_claim", claim)


def acknowledgements_are_not_verified() -> AbstractContextManager:
    """What was read is used, whatever the producer says to it."""
    original = Reader._acknowledged
    return patch.object(Reader, "_acknowledged", lambda self, active, reply: original(self, active, Held()))


def acknowledgements_are_counted() -> AbstractContextManager:
    """Two acknowledgements are two, whoever sent them."""

    def acknowledge(self, message):
        grant = self._grants.get(message.request)
        if grant is None or not grant.waiting.get(message.claim):
            return GONE
        grant.waiting[message.claim].pop()
        self._end_unless_awaited(grant)
        return Held()

    return patch.object(Grants, "_ack", acknowledge)


def what_has_ended_is_named_again() -> AbstractContextManager:
    """Requests whose blocks may be freed are told to the workers with every step."""
    return patch.object(Grants, "take_ended", lambda self: list(self._ended))


def reads_are_not_awaited() -> AbstractContextManager:
    """A reader is done when its first read has ended, well or badly."""

    def poll(self):
        for active in list(self._reading):
            ended = [self._agent.poll(posted.read) or posted.read.error for posted in active.under_way]
            if any(ended):
                self._reading.remove(active)
                active.ended, active.under_way = active.under_way, []
                self._advance(active)

    return patch.object(Reader, "_poll", poll)


def lives_are_not_told_apart() -> AbstractContextManager:
    """What was read before a preemption counts."""
    original = Reader._followed

    def followed(self, active, reply):
        active.life = reply.life if isinstance(reply, Granted) else active.life
        original(self, active, reply)

    return patch.object(Reader, "_followed", followed)


def what_is_scheduled_counts_as_computed() -> AbstractContextManager:
    """Tokens may be read before their step has been executed."""
    original = Progress.scheduled

    def scheduled(self, output):
        step, news = original(self, output)
        return step, [*news, *self._steps.get(step, ())]

    return patch.object(Progress, "scheduled", scheduled)


def an_open_grant_is_vouched_for() -> AbstractContextManager:
    """Whoever acknowledges before the prefill has ended is believed."""
    original = Grants._ack

    def acknowledge(self, message):
        reply = original(self, message)
        return Held() if isinstance(reply, Released) else reply

    return patch.object(Grants, "_ack", acknowledge)


def claims_outlive_their_requests() -> AbstractContextManager:
    """An offer is claimed for whoever it came with, also when that has been aborted meanwhile."""
    return patch.object(
        Loads, "expects", lambda self, expected: bool(self._expected.setdefault(expected.request, expected))
    )


MUTATIONS = (
    claims_outlive_their_requests,
    claims_are_not_checked,
    nonces_are_not_checked,
    acknowledgements_are_not_verified,
    acknowledgements_are_counted,
    what_has_ended_is_named_again,
    reads_are_not_awaited,
    lives_are_not_told_apart,
    what_is_scheduled_counts_as_computed,
    an_open_grant_is_vouched_for,
)


def _first_failure(mutation):
    """What the first seed that fails says."""
    with mutation():
        for seed in range(SEEDS):
            _, result = attempt(seed)
            if isinstance(result, str):
                print(f"{mutation.__name__}: {seed + 1} seeds until {result.splitlines()[0]}")
                return result
    return pytest.fail(f"{SEEDS} seeds did not notice")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_the_simulation_fails_without(mutation):
    _first_failure(mutation)


@pytest.mark.parametrize(
    "mutation", [acknowledgements_are_not_verified, reads_are_not_awaited], ids=lambda mutation: mutation.__name__
)
def test_a_read_that_should_not_be_trusted_shows_in_the_bytes_alone(mutation, monkeypatch):
    """Blocks are really reused: without any rule but "the content is right", the simulation fails too."""

    def require(condition, rule, *text):
        if rule == invariants.CONTENT:
            original(condition, rule, *text)

    original = invariants.require
    for module in (invariants, engine, worker):
        monkeypatch.setattr(module, "require", require)
    assert invariants.CONTENT in _first_failure(mutation)
