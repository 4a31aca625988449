"""The producer's side: which finished requests are held for whom, and until when.

A grant lives in one of two states. OFFERED: its parameters are on their way to some consumer. HELD: one consumer
claimed it, and its workers read. It ends when every expected reader has acknowledged, when the consumer releases it,
or when its lease runs out; from then on nothing is ever answered with ``Held``. What has ended is not remembered: to
an ended, a forged and a never-made grant the answer is the same ``Gone``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry.geometry import NULL_BLOCK
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

MAX_CLAIMS = 1 << 14
"""On one grant: more requests than vLLM makes of one with ``n > 1``, and a bound for who makes up claims."""

GONE = Gone("not held: already released, expired, or never granted by this engine")


@dataclass(slots=True)
class Grant:
    """One request's blocks, promised.

    Attributes:
        blocks: block ids by KV cache group.
        deadline: when the lease runs out, on the producer's own clock.
        consumer: incarnation that claimed it; None while OFFERED.
        waiting: for each claim, the readers that have not acknowledged; none for a claim that has ended, so that a late
            copy of it is known. Several requests of one consumer may share a grant (n > 1), each under a claim of its
            own.
    """

    request: str
    nonce: str
    blocks: list[list[int]]
    tokens: int
    deadline: float
    consumer: str | None = None
    waiting: dict[str, set[str]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Blocks that are held, null blocks not counted."""
        return sum(len(group) - group.count(NULL_BLOCK) for group in self.blocks)


class Grants:
    """All grants of one engine core. Not thread-safe: the caller holds a lock.

    Args:
        incarnation: of this engine core.
        lease: seconds that an unclaimed or unrenewed grant lives.
        clock: monotonic seconds; only differences of it ever leave the process.
        on_end: called for every grant that has ended, with the seconds that were left of its lease; None when it ended
            with its lease.

    Attributes:
        held_blocks: in all grants together; a block that two of them share counts twice.
    """

    def __init__(
        self,
        incarnation: str,
        lease: float,
        clock: Callable[[], float],
        on_end: Callable[[float | None], None] = lambda left: None,  # noqa: ARG005
    ) -> None:
        self.incarnation = incarnation
        self.lease = lease
        self.held_blocks = 0
        self._clock = clock
        self._on_end = on_end
        # Always in the order of their deadlines: a lease is as long as any other, so the one prolonged last ends last.
        self._grants: dict[str, Grant] = {}
        self._ended: list[str] = []

    def __len__(self) -> int:
        return len(self._grants)

    def offer(self, request: str, blocks: Sequence[Sequence[int]], tokens: int) -> Grant:
        """Hold the blocks of a finished request from now on."""
        grant = Grant(request, draw(), [list(group) for group in blocks], tokens, self._clock() + self.lease)
        self._grants[request] = grant
        self.held_blocks += grant.size
        return grant

    def expire(self) -> float | None:
        """End every grant whose lease has run out; returns seconds until the next one does, None without any."""
        now = self._clock()
        while self._grants:
            first = next(iter(self._grants.values()))
            if first.deadline > now:
                return first.deadline - now
            self._end(first, None)
        return None

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
        if not (self._has_room(grant, message.claim) and grant.waiting.setdefault(message.claim, set(message.readers))):
            return GONE
        grant.consumer = message.consumer
        self._prolong(grant)
        return Granted(grant.blocks, grant.tokens, self.lease)

    def _ack(self, message: Ack) -> Reply:
        grant = self._grants.get(message.request)
        if grant is None or message.reader not in grant.waiting.get(message.claim, ()):
            return GONE
        grant.waiting[message.claim].remove(message.reader)
        self._end_unless_awaited(grant)
        return Held()

    def _renew(self, message: Renew) -> Reply:
        gone = []
        for request, claim in message.claims:
            grant = self._grants.get(request)
            if grant is None or not grant.waiting.get(claim):
                gone.append(claim)
            else:
                self._prolong(grant)
        return Renewed(gone)

    def _release(self, message: Release) -> Reply:
        grant = self._grants.get(message.request)
        if grant is not None and grant.nonce == message.nonce and self._has_room(grant, message.claim):
            # Claims of others go on. Of this one nothing is heard any more, also if it is still on its way.
            grant.waiting[message.claim] = set()
            self._end_unless_awaited(grant)
        return Released()

    @staticmethod
    def _has_room(grant: Grant, claim: str) -> bool:
        return claim in grant.waiting or len(grant.waiting) < MAX_CLAIMS

    def _prolong(self, grant: Grant) -> None:
        grant.deadline = self._clock() + self.lease
        self._grants[grant.request] = self._grants.pop(grant.request)

    def _end_unless_awaited(self, grant: Grant) -> None:
        if not any(grant.waiting.values()):
            self._end(grant, grant.deadline - self._clock())

    def _end(self, grant: Grant, left: float | None) -> None:
        del self._grants[grant.request]
        self._ended.append(grant.request)
        self.held_blocks -= grant.size
        self._on_end(left)
