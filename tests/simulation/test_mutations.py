"""Each safeguard of the protocol is needed: with any one of them off, the simulation fails soon."""

from contextlib import AbstractContextManager
from unittest.mock import patch

import msgspec
import pytest

from kvferry.protocol.grants import GONE, Grants
from kvferry.protocol.messages import Granted, Held
from kvferry.transport.reader import Reader

from . import engine, invariants, worker
from .seeds import attempt

SEEDS = 1000


def claims_are_not_checked() -> AbstractContextManager:
    """Whoever claims a grant gets it, also after somebody else."""

    def claim(self, message):
        grant = self._grants.get(message.request)
        if grant is None or grant.nonce != message.nonce:
            return GONE
        grant.consumer = message.consumer
        grant.waiting.setdefault(message.claim, set(message.readers))
        grant.deadline = self._clock() + self.lease
        return Granted(grant.blocks, grant.tokens, self.lease)

    return patch.object(Grants, "_claim", claim)


def nonces_are_not_checked() -> AbstractContextManager:
    """It is enough to guess the name of a request."""
    original = Grants._claim

    def claim(self, message):
        grant = self._grants.get(message.request)
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
            ended = [self._agent.poll(read) or read.error for read in active.reads.values()]
            if any(ended) or not ended:
                self._reading.remove(active)
                self._acknowledge(active)

    return patch.object(Reader, "_poll", poll)


MUTATIONS = (
    claims_are_not_checked,
    nonces_are_not_checked,
    acknowledgements_are_not_verified,
    acknowledgements_are_counted,
    what_has_ended_is_named_again,
    reads_are_not_awaited,
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
