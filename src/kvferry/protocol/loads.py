"""The consumer's side, per engine core: which requests claim, hold and load remote KV caches.

    EXPECTED -> CLAIMING -> GRANTED -> LOADING -> forgotten
        |           |          |
        +-----------+----------+-----> forgotten: refused, GONE, deadline, abort, or found locally. The request is
                                       computed here.

One load per request: once it is forgotten (done or failed), the request never asks for remote KV again.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from kvferry.geometry import Span
from kvferry.protocol.messages import Address, Claim, Gone, Granted, Offer, Release, Renew, Renewed, Reply, Waiting


@dataclass(frozen=True, slots=True)
class Order:
    """What a worker needs to load its part of one request: sent once, to every worker.

    Attributes:
        request: the consumer's id of the request; ``remote_request`` is the producer's.
        address, incarnation: of the producer.
        claim: under which the workers acknowledge.
        grant: what may be read as of now; unless it is complete, the workers follow it.
        local_blocks: block ids by KV cache group, from token 0 on.
        first_token, last_token: half-open range of absolute positions to load.
        layout: the producer's, as its offer says it, for logs.
    """

    request: str
    remote_request: str
    address: Address
    incarnation: str
    claim: str
    grant: Granted
    local_blocks: list[list[int]]
    first_token: int
    last_token: int
    layout: str = ""


class State(Enum):
    CLAIMING = auto()
    GRANTED = auto()
    LOADING = auto()


@dataclass(slots=True)
class Load:
    """One request that may load its prompt's KV cache from ``offer``.

    Attributes:
        message: this load's own acceptance of the offer.
        deadline: until when the request waits for an answer to the claim, on this process's clock.
        grant: the producer's answer.
        renew_at: when the lease is to be prolonged next.
        give_back_at: until when the grant may wait for blocks here.
        lost: the producer no longer holds the grant, or need not.
    """

    request: str
    offer: Offer
    message: Claim
    deadline: float
    state: State = State.CLAIMING
    grant: Granted | None = None
    renew_at: float = 0.0
    give_back_at: float = 0.0
    lost: bool = False

    @property
    def claim(self) -> str:
        return self.message.claim

    @property
    def due_at(self) -> float | None:
        """When something must be said to the producer; None for never."""
        if self.grant is None or self.lost:
            return None
        return min(self.renew_at, self.give_back_at) if self.state is State.GRANTED else self.renew_at

    @property
    def release(self) -> tuple[Address, Release]:
        """Tells the producer that it need not hold the grant for this load."""
        offer = self.offer
        return offer.address, Release(offer.incarnation, offer.request, offer.nonce, self.claim)


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """A request whose offer is yet to be read; it waits from ``since`` until ``deadline``."""

    request: str
    since: float
    deadline: float


class Loads:
    """All loads of one engine core. Not thread-safe: the caller holds a lock.

    Args:
        consumer: incarnation of this engine core.
        readers: names of its workers.
        claim_timeout: seconds that a request waits for the answer to its claim.
        hold_timeout: seconds that a grant may wait for blocks here. Two engines that each hold what the other waits to
            load would otherwise renew each other's grants for ever, and neither would have a block to load into.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        consumer: str,
        readers: list[str],
        claim_timeout: float,
        hold_timeout: float,
        clock: Callable[[], float],
    ) -> None:
        self._consumer = consumer
        self._readers = readers
        self._claim_timeout = claim_timeout
        self._hold_timeout = hold_timeout
        self._clock = clock
        self._expected: dict[str, Expected] = {}
        self._loads: dict[str, Load] = {}
        self._timers: list[tuple[float, int, Load]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._expected) + len(self._loads)

    def expect(self, request: str) -> Expected:
        """A request with an offer arrived that somebody is about to read."""
        now = self._clock()
        expected = self._expected[request] = Expected(request, now, now + self._claim_timeout)
        return expected

    def expects(self, expected: Expected) -> bool:
        """Whether the request still waits for its offer to be read."""
        return self._expected.get(expected.request) is expected

    def settle(self, expected: Expected) -> None:
        """Its offer has been read, for good or ill: nobody waits for that any more."""
        if self.expects(expected):
            del self._expected[expected.request]

    def begin(self, expected: Expected, offer: Offer, name: str, tokens: int, token_hash: str) -> Claim | None:
        """Accept an offer; returns the claim to send to its address, None when the request no longer waits for it.

        Args:
            name: drawn for this claim.
            tokens, token_hash: what is claimed: what the offer says, or where it says nothing all of the prompt.
        """
        if not self.expects(expected):
            return None
        self.settle(expected)
        names = (offer.incarnation, offer.request, offer.nonce, name, self._consumer)
        claim = Claim(*names, self._readers, tokens, token_hash, ahead=offer.tokens is None)
        self._loads[expected.request] = Load(expected.request, offer, claim, expected.deadline)
        return claim

    def claimed(self, request: str, claim: str, reply: Reply) -> Claim | str | None:
        """The answer to a claim came; returns the claim if it is to be sent again, why there is nothing to load if
        there is nothing, None if there is.
        """
        load = self._claiming(request, claim)
        if load is None:
            return None
        now = self._clock()
        if isinstance(reply, Waiting):
            if reply.known:
                load.deadline = now + self._claim_timeout
            if now < load.deadline:
                return load.message
            reply = Gone("the request that was to prefill it did not come")
        if isinstance(reply, Granted) and reply.tokens >= load.message.tokens:
            load.state, load.grant = State.GRANTED, reply
            load.renew_at, load.give_back_at = now + reply.ttl / 3, now + self._hold_timeout
            self._time(load)
            return None
        del self._loads[request]
        return reply.reason if isinstance(reply, Gone) else "no valid answer to the claim"

    def unanswered(self, request: str, claim: str) -> tuple[Address, Release] | None:
        """No answer to a claim came; what to send where, for it may have arrived all the same."""
        return self.drop(request) if self._claiming(request, claim) else None

    def _claiming(self, request: str, claim: str) -> Load | None:
        """The load that waits for the answer to this claim, if one does: another request may have its name by now."""
        load = self._loads.get(request)
        return load if load is not None and load.state is State.CLAIMING and load.claim == claim else None

    def available(self, request: str) -> int | None:
        """Tokens from the first on that the request can load: 0 for none, None while that is not known yet."""
        load = self._loads.get(request)
        if load is not None and load.state is not State.CLAIMING:
            return load.message.tokens if load.state is State.GRANTED and not load.lost else 0
        waits = load or self._expected.get(request)
        return None if waits and self._clock() < waits.deadline else 0

    def lost(self, request: str) -> Literal["late", "lost"] | None:
        """Why a request that waits has nothing to load: no answer came in time, or its grant is gone; else None."""
        load = self._loads.get(request)
        if load is not None and load.state is not State.CLAIMING:
            return "lost" if load.state is State.GRANTED and load.lost else None
        waits = load or self._expected.get(request)
        return "late" if waits and self._clock() >= waits.deadline else None

    def start(self, request: str, local_blocks: list[list[int]], tokens: Span) -> Order | None:
        """The blocks to load into are there; returns the workers' order, None when nothing was ever granted.

        A grant that was lost since ``available`` counted it is ordered all the same: the request waits for its workers
        by now, and they will find it gone.
        """
        load = self._loads.get(request)
        if load is None or load.state is not State.GRANTED or load.grant is None:
            return None
        load.state = State.LOADING
        offer = load.offer
        return Order(
            request=request,
            remote_request=offer.request,
            address=load.offer.address,
            incarnation=offer.incarnation,
            claim=load.claim,
            grant=load.grant,
            local_blocks=local_blocks,
            first_token=tokens.start,
            last_token=tokens.stop,
            layout=offer.layout,
        )

    def drop(self, request: str) -> tuple[Address, Release] | None:
        """The request will not load (any more): what to send where, None if it reads already or never would.

        Workers that follow a prefill still under way are told so by its producer, which is told now.
        """
        self._expected.pop(request, None)  # whoever reads its offer will find that it does not wait
        load = self._loads.get(request)
        if load is None:
            return None
        if load.state is State.LOADING:
            return load.release if load.grant is not None and not load.grant.complete else None
        del self._loads[request]
        return load.release

    def finished(self, request: str) -> bool:
        """Every worker has reported the request, well or badly; returns whether it was one of these."""
        return self._loads.pop(request, None) is not None

    def due(self) -> list[tuple[Address, Renew | Release]]:
        """What to send now: one renewal per producer, and what has waited for blocks for too long."""
        now = self._clock()
        batches: dict[tuple[Address, str], list[tuple[str, str]]] = {}
        given_back = []
        while (load := self._first()) is not None and load.due_at is not None and load.due_at <= now:
            heapq.heappop(self._timers)
            if load.state is State.GRANTED and load.give_back_at <= now:
                load.lost = True
                given_back.append(load.release)
            elif load.grant is not None:
                load.renew_at = now + load.grant.ttl / 3
                key = (load.offer.address, load.offer.incarnation)
                batches.setdefault(key, []).append((load.offer.request, load.claim))
                self._time(load)
        renewals = [(address, Renew(incarnation, claims)) for (address, incarnation), claims in batches.items()]
        return [*renewals, *given_back]

    def renewed(self, reply: Reply | None) -> None:
        """Remember which grants the producer no longer holds.

        A load under way learns it from the answer to its acknowledgement.
        """
        gone = set(reply.gone) if isinstance(reply, Renewed) else set()
        for load in self._loads.values() if gone else ():
            load.lost = load.lost or load.claim in gone

    def next_due(self) -> float | None:
        """Seconds until ``due`` has something to send, None while it has not."""
        first = self._first()
        return None if first is None or first.due_at is None else max(0.0, first.due_at - self._clock())

    def _time(self, load: Load) -> None:
        """Have a look at a load when it will be due. Each that is granted has one entry, which may be too early."""
        if load.due_at is not None:
            heapq.heappush(self._timers, (load.due_at, next(self._numbers), load))

    def _first(self) -> Load | None:
        """The load that is due first."""
        while self._timers:
            moment, _, load = self._timers[0]
            if load.due_at == moment and self._loads.get(load.request) is load:
                return load
            heapq.heappop(self._timers)
            if self._loads.get(load.request) is load:
                self._time(load)
        return None
