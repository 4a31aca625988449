"""The producer's side: which finished requests are held for whom, and until when.

A grant lives in one of two states. OFFERED: its parameters are on their way to some consumer. HELD: one consumer
claimed it, and its workers read. It ends when every expected reader has acknowledged, when the consumer releases it,
or when its lease runs out; from then on nothing is ever answered with ``Held``. What has ended is not remembered: to
an ended, a forged and a never-made grant the answer is the same ``Gone``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry.protocol.identity import draw
from kvferry.protocol.messages import (
    Ack,
    Claim,
    Gone,
    Granted,
    Held,
    Hello,
    Release,
    Released,
    Renew,
    Renewed,
    Reply,
    Request,
)

GONE = Gone("not held: already released, expired, or never granted by this engine")


@dataclass(slots=True)
class Grant:
    """One request's blocks, promised.

    Attributes:
        blocks: block ids by KV cache group.
        deadline: when the lease runs out, on the producer's own clock.
        consumer: incarnation that claimed it; None while OFFERED.
        waiting: for each claim, the readers that have not acknowledged. Several requests of one consumer may share a
            grant (n > 1), each under a claim of its own.
    """

    request: str
    nonce: str
    blocks: list[list[int]]
    tokens: int
    deadline: float
    consumer: str | None = None
    waiting: dict[str, set[str]] = field(default_factory=dict)


class Grants:
    """All grants of one engine core. Not thread-safe: the caller holds a lock.

    Args:
        incarnation: of this engine core.
        lease: seconds that an unclaimed or unrenewed grant lives.
        clock: monotonic seconds; only differences of it ever leave the process.
    """

    def __init__(self, incarnation: str, lease: float, clock: Callable[[], float]) -> None:
        self.incarnation = incarnation
        self.lease = lease
        self._clock = clock
        self._grants: dict[str, Grant] = {}
        self._ended: list[str] = []

    def __len__(self) -> int:
        return len(self._grants)

    def offer(self, request: str, blocks: Sequence[Sequence[int]], tokens: int) -> Grant:
        """Hold the blocks of a finished request from now on."""
        grant = Grant(request, draw(), [list(group) for group in blocks], tokens, self._clock() + self.lease)
        self._grants[request] = grant
        return grant

    def expire(self) -> float | None:
        """End every grant whose lease has run out; returns seconds until the next one does, None without any."""
        now = self._clock()
        for grant in [grant for grant in self._grants.values() if grant.deadline <= now]:
            self._end(grant)
        return min((grant.deadline - now for grant in self._grants.values()), default=None)

    def take_ended(self) -> list[str]:
        """Requests whose blocks may be freed, each named once."""
        ended, self._ended = self._ended, []
        return ended

    def answer(self, message: Request) -> Reply:
        """Answer any message but ``Hello``. Leases are looked at first, so an answer is never too late to be true."""
        self.expire()
        if message.incarnation != self.incarnation:
            return Gone("this address now belongs to another incarnation")
        match message:
            case Claim():
                return self._claim(message)
            case Ack():
                return self._ack(message)
            case Renew():
                return self._renew(message)
            case Release():
                return self._release(message)
            case Hello():
                return GONE

    def _claim(self, message: Claim) -> Reply:
        grant = self._grants.get(message.request)
        if grant is None or grant.nonce != message.nonce or grant.consumer not in (None, message.consumer):
            return GONE
        grant.consumer = message.consumer
        grant.waiting.setdefault(message.claim, set(message.readers))
        grant.deadline = self._clock() + self.lease
        return Granted(grant.blocks, grant.tokens, self.lease)

    def _ack(self, message: Ack) -> Reply:
        grant = self._grants.get(message.request)
        if grant is None or message.claim not in grant.waiting:
            return GONE
        readers = grant.waiting[message.claim]
        if message.reader not in readers:
            return GONE
        readers.remove(message.reader)
        if not readers:
            self._drop_claim(grant, message.claim)
        return Held()

    def _renew(self, message: Renew) -> Reply:
        gone = []
        for request, claim in message.claims:
            grant = self._grants.get(request)
            if grant is None or claim not in grant.waiting:
                gone.append(claim)
            else:
                grant.deadline = self._clock() + self.lease
        return Renewed(gone)

    def _release(self, message: Release) -> Reply:
        grant = self._grants.get(message.request)
        # A claim of another consumer is not this one's to end.
        if grant is not None and grant.nonce == message.nonce:
            if grant.consumer is None:
                self._end(grant)
            elif message.claim in grant.waiting:
                self._drop_claim(grant, message.claim)
        return Released()

    def _drop_claim(self, grant: Grant, claim: str) -> None:
        del grant.waiting[claim]
        if not grant.waiting:
            self._end(grant)

    def _end(self, grant: Grant) -> None:
        del self._grants[grant.request]
        self._ended.append(grant.request)
