"""The producer's state machine in random histories: no grant outlives its lease or is freed twice."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from kvferry.protocol.grants import Grants
from kvferry.protocol.identity import draw
from kvferry.protocol.messages import (
    Granted,
    Held,
    Released,
    Renew,
)

from .granting import BLOCKS, CONSUMER, HASH, INCARNATION, LEASE, READERS, STRANGER, Clock, ack_of, claim_of, release_of


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
        if isinstance(self.grants.answer(claim_of(grant, claim, consumer)), Granted):
            self._must_be_alive(grant)
            self.alive_until[grant.request] = self.clock.now + LEASE

    @rule(grant=offered, claim=claims, reader=st.sampled_from([*READERS, "pp9tp9"]))
    def ack(self, grant, claim, reader):
        if self.grants.answer(ack_of(grant, reader, claim)) == Held():
            self._must_be_alive(grant)

    @rule(grant=offered, claim=claims)
    def renew(self, grant, claim):
        if not self.grants.answer(Renew(INCARNATION, [(grant.request, claim)])).gone:
            self._must_be_alive(grant)
            self.alive_until[grant.request] = self.clock.now + LEASE

    @rule(grant=offered, claim=claims)
    def release(self, grant, claim):
        assert self.grants.answer(release_of(grant, claim)) == Released()

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
