"""The rules of the protocol, checked from outside after every event.

I1  A request runs on remote KV only after the producer vouched to every reader, and every byte is right.
I2  Blocks of a grant are not freed while it is held; what has ended is never vouched for.
I3  Every request ends once, and each worker reports it once.
I4  Nothing is reported while a read may still write.
I5  A grant is for one consumer and used once; what is refused changes nothing.
I6  Clocks do not cross a process: every process has its own.
I7  No message ends a listener or a thread: errors that are only logged count as violations.
I8  Nothing is held longer than its lease, and nothing waits longer than its deadline.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.protocol.messages import (
    Ack,
    Claim,
    Follow,
    Gone,
    Granted,
    Held,
    Hello,
    Release,
    Renew,
    Renewed,
    Reply,
    Request,
    Waiting,
)

from .world import ViolationError, World

if TYPE_CHECKING:
    from .engine import Core
    from .requests import SimulatedRequest

LATE_S = 1.1
"""How long after its moment a thread may get round to something: it looks at the clock at least once a second."""


CONTENT = "I1 (content)"
"""The part of I1 that needs no knowledge of the protocol: what a request attends to is its own."""


def require(condition: object, rule: str, text: str, *values: object) -> None:
    if not condition:
        raise ViolationError(f"{rule}: {text.format(*values)}")


@dataclass(slots=True)
class Promise:
    """What the ledger knows of one grant.

    Attributes:
        until: when its lease ends; infinite while the prefill goes on.
        readers: for each claim, who has not been answered ``Held``.
    """

    nonce: str
    blocks: list[list[int]]
    until: float
    consumer: str | None = None
    readers: dict[str, set[str]] = field(default_factory=dict)
    ended: bool = False


class Ledger:
    """A second opinion on every answer of every producer.

    Attributes:
        held: (claim, reader) that were answered ``Held``.
    """

    def __init__(self, world: World, lease: float) -> None:
        self._world, self._lease = world, lease
        self._promises: dict[tuple[str, str], Promise] = {}
        self.held: set[tuple[str, str]] = set()
        self._given_up: dict[tuple[str, str, str], set[str]] = {}

    def opened(self, incarnation: str, request: str, nonce: str) -> None:
        given_up = self._given_up.pop((incarnation, request, nonce), ())
        self._promises[incarnation, request] = Promise(
            nonce, [], math.inf, readers={claim: set() for claim in given_up}
        )

    def closed(self, incarnation: str, request: str) -> None:
        """A prefill ended without being offered."""
        if (incarnation, request) in self._promises:
            self._promises[incarnation, request].ended = True

    def offered(self, incarnation: str, request: str, nonce: str, blocks: list[list[int]]) -> None:
        promise = self._promises.setdefault((incarnation, request), Promise(nonce, [], 0.0))
        require(promise.nonce == nonce, "I5", "{} is offered under another nonce", request)
        promise.blocks, promise.until = blocks, self._world.now + self._lease
        promise.ended = bool(promise.readers) and not any(promise.readers.values())

    def state(self, incarnation: str, request: str) -> str:
        """Of a grant, as far as messages are concerned."""
        promise = self._live(incarnation, request)
        if promise is None:
            return "none"
        if promise.until == math.inf:
            return "open" if promise.consumer is None else "followed"
        return "offered" if promise.consumer is None else "held"

    def _live(self, incarnation: str, request: str) -> Promise | None:
        promise = self._promises.get((incarnation, request))
        if promise is None or promise.ended or promise.until <= self._world.now:
            return None
        return promise

    def freed(self, incarnation: str, request: str) -> list[str]:
        """vLLM frees the blocks; returns claims that were still to be acknowledged when the lease ended."""
        require(self._live(incarnation, request) is None, "I2", "the blocks of {} are freed while it is held", request)
        promise = self._promises[incarnation, request]
        if promise.ended:
            return []
        self._world.cover("grant:held" if promise.consumer else "grant:offered", "lease ended")
        return [claim for claim, readers in promise.readers.items() if readers]

    def overdue(self, incarnation: str, request: str) -> bool:
        """Whether a grant that is still kept should have ended some time ago."""
        promise = self._promises[incarnation, request]
        return promise.ended or promise.until + LATE_S < self._world.now

    def answered(self, incarnation: str, message: Request, reply: Reply) -> None:
        if isinstance(message, Release):  # also what was meant for another incarnation: the nonce says what it is about
            self._released(incarnation, message)
            return
        if message.incarnation != incarnation:
            require(isinstance(reply, Gone), "I5", "{} for another incarnation is answered {}", message, reply)
            return
        match message:
            case Claim():
                self._claimed(message, reply)
            case Follow():
                self._followed(message, reply)
            case Ack():
                self._acknowledged(message, reply)
            case Renew():
                self._renewed(message, reply)
            case Hello():
                pass

    def _claimed(self, message: Claim, reply: Reply) -> None:
        promise = self._live(message.incarnation, message.request)
        due = (
            promise is not None
            and promise.nonce == message.nonce
            and promise.consumer in (None, message.consumer)
            and promise.readers.get(message.claim) != set()
        )
        if isinstance(reply, Waiting):
            # Nothing is held yet, or nothing is known.
            require(promise is None or (due and promise.until == math.inf), "I5", "{} waits for {}", message, promise)
            require(reply.known == (promise is not None), "I5", "{} is answered {}", message, reply)
            return
        other = isinstance(reply, Gone) and "another prompt" in reply.reason
        require((due and not other) == isinstance(reply, Granted), "I5", "{} is answered {}", message, reply)
        if promise is not None and isinstance(reply, Granted):
            promise.consumer = message.consumer
            promise.readers.setdefault(message.claim, set(message.readers))
            self._prolong(promise)

    def _followed(self, message: Follow, reply: Reply) -> None:
        promise = self._live(message.incarnation, message.request)
        due = promise is not None and message.reader in promise.readers.get(message.claim, ())
        require(due == isinstance(reply, Granted), "I5", "{} is answered {}", message, reply)

    def _prolong(self, promise: Promise) -> None:
        if promise.until < math.inf:
            promise.until = self._world.now + self._lease

    def _acknowledged(self, message: Ack, reply: Reply) -> None:
        promise = self._live(message.incarnation, message.request)
        due = promise is not None and message.reader in promise.readers.get(message.claim, ())
        still_open = promise is not None and promise.until == math.inf
        require((due and not still_open) == isinstance(reply, Held), "I2", "{} is answered {}", message, reply)
        if promise is not None and due:
            promise.readers[message.claim].remove(message.reader)
            if not still_open:
                self.held.add((message.claim, message.reader))
                promise.ended = not any(promise.readers.values())

    def _renewed(self, message: Renew, reply: Reply) -> None:
        require(isinstance(reply, Renewed), "I7", "{} is answered {}", message, reply)
        for request, claim in message.claims:
            promise = self._live(message.incarnation, request)
            due = promise is not None and bool(promise.readers.get(claim))
            require(due == (claim not in reply.gone), "I2", "{} is answered {}", message, reply)
            if promise is not None and due:
                self._prolong(promise)

    def _released(self, incarnation: str, message: Release) -> None:
        promise = self._live(incarnation, message.request)
        if promise is None:
            key = incarnation, message.request, message.nonce
            self._given_up.setdefault(key, set()).add(message.claim)
            return
        if promise.nonce != message.nonce:
            return
        promise.readers[message.claim] = set()
        promise.ended = promise.until < math.inf and not any(promise.readers.values())


def picture(core: Core) -> dict[str, tuple[object, ...]]:
    """What can change of each grant, to compare later."""
    return {
        name: (grant.consumer, grant.deadline, {claim: frozenset(left) for claim, left in grant.waiting.items()})
        for name, grant in (core.grants | core.open_grants).items()
    }


def readable(core: Core, name: str, granted: Granted) -> None:
    """A producer says what may be read: on every worker that is the prompt's own KV, at this moment."""
    grant = core.grants.get(name) or core.open_grants[name]
    request = core.requests[grant.request]
    require(granted.ready <= granted.tokens == request.num_prompt_tokens, "I1", "{} is granted as {}", name, granted)
    for worker in core.workers if granted.ready else ():
        right = worker.cache.holds(granted.blocks[0], request.tokens, granted.ready)
        require(right, CONTENT, "{} is said to be readable on {}: {}", name, worker.name, granted)


def watch(core: Core) -> None:
    """What holds for an engine core at any moment."""
    for name, grant in core.grants.items():
        request, blocks = core.requests.get(grant.request), grant.blocks[0]
        if request is None or request.blocks[: len(blocks)] != blocks:
            raise ViolationError(f"I2: the blocks of {name} are free, and it is held")
        if core.place.ledger.overdue(core.incarnation, name):
            raise ViolationError(f"I8: {name} is held for too long")


def runnable(core: Core, request: SimulatedRequest) -> None:
    """The scheduler takes a request for loaded."""
    name, order = request.request_id, request.order
    require(order is not None, "I1", "{} runs on remote KV that was never ordered", name)
    for worker in core.workers:
        vouched = (order.claim, worker.name) in core.place.ledger.held
        require(vouched, "I1", "{} runs without the producer's word to {}", name, worker.name)
        right = worker.cache.holds(request.blocks, request.tokens, request.num_computed_tokens)
        require(right, CONTENT, "{} was loaded with wrong KV on {}", name, worker.name)
