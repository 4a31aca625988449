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

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.protocol.grants import Grant
from kvferry.protocol.messages import Ack, Claim, Gone, Granted, Held, Hello, Release, Renew, Renewed, Reply, Request

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
        until: when its lease ends.
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

    def offered(self, incarnation: str, request: str, nonce: str, blocks: list[list[int]]) -> None:
        self._promises[incarnation, request] = Promise(nonce, blocks, self._world.now + self._lease)

    def state(self, incarnation: str, request: str) -> str:
        """Of a grant, as far as messages are concerned."""
        promise = self._live(incarnation, request)
        return "none" if promise is None else "offered" if promise.consumer is None else "held"

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
        if message.incarnation != incarnation:
            require(isinstance(reply, Gone), "I5", "{} for another incarnation is answered {}", message, reply)
            return
        match message:
            case Claim():
                self._claimed(message, reply)
            case Ack():
                self._acknowledged(message, reply)
            case Renew():
                self._renewed(message, reply)
            case Release():
                self._released(message)
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
        require(due == isinstance(reply, Granted), "I5", "{} is answered {}", message, reply)
        if due and isinstance(reply, Granted):
            require(reply.blocks == promise.blocks, "I5", "{} is granted other blocks: {}", message, reply)
            promise.consumer = message.consumer
            promise.readers.setdefault(message.claim, set(message.readers))
            promise.until = self._world.now + self._lease

    def _acknowledged(self, message: Ack, reply: Reply) -> None:
        promise = self._live(message.incarnation, message.request)
        due = promise is not None and message.reader in promise.readers.get(message.claim, ())
        require(due == isinstance(reply, Held), "I2", "{} is answered {}", message, reply)
        if due:
            self.held.add((message.claim, message.reader))
            promise.readers[message.claim].remove(message.reader)
            promise.ended = not any(promise.readers.values())

    def _renewed(self, message: Renew, reply: Reply) -> None:
        require(isinstance(reply, Renewed), "I7", "{} is answered {}", message, reply)
        for request, claim in message.claims:
            promise = self._live(message.incarnation, request)
            due = promise is not None and bool(promise.readers.get(claim))
            require(due == (claim not in reply.gone), "I2", "{} is answered {}", message, reply)
            if due:
                promise.until = self._world.now + self._lease

    def _released(self, message: Release) -> None:
        promise = self._live(message.incarnation, message.request)
        if promise is None or promise.nonce != message.nonce:
            return
        promise.readers[message.claim] = set()
        promise.ended = not any(promise.readers.values())


def picture(grants: dict[str, Grant]) -> dict[str, tuple[object, ...]]:
    """What can change of each grant, to compare later."""
    return {
        name: (grant.consumer, grant.deadline, {claim: frozenset(left) for claim, left in grant.waiting.items()})
        for name, grant in grants.items()
    }


def watch(core: Core) -> None:
    """What holds for an engine core at any moment."""
    for name, grant in core.grants.items():
        request, blocks = core.requests.get(name), grant.blocks[0]
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
