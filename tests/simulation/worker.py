"""A worker process: a cache, an agent, the real reader, and the steps that it executes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvferry.geometry import EngineLayout, Span
from kvferry.protocol.loads import Order
from kvferry.protocol.messages import WAIT_S, Follow, Hello, Reply, Request
from kvferry.transport.reader import Deadlines, Outcome, Reader
from kvferry.vllm.metadata import Handshake, StepMetadata

from .invariants import CONTENT, require
from .memory import Agent, Cache
from .network import Client
from .place import FINGERPRINT
from .requests import SimulatedRequest

if TYPE_CHECKING:
    from .engine import Core


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens of a request that a step computes, in the blocks that it had then."""

    request: SimulatedRequest
    blocks: list[int]
    span: Span


@dataclass(eq=False)
class Step:
    """One step of the engine: what it computes, and what the workers said about transfers in it."""

    metadata: StepMetadata
    work: list[Work]
    sent: list[set[str]] = field(default_factory=list)
    received: list[set[str]] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)


class Worker:
    """Does around the reader what ``kvferry.vllm.worker`` does.

    Attributes:
        orders: given to the reader and not ended.
    """

    THREAD_S = 0.02
    LOOK_S = 0.4

    def __init__(self, core: Core, rank: tuple[int, int]) -> None:
        place, shape = core.place, core.shape
        self.core, self.world = core, place.world
        self.cache = Cache(rank, shape, place.fabric.address())
        self.agent = Agent(place.fabric, core.host, core, self.cache, self._written, self._read)
        self.client = Client(place.network, core.host, core, None, self._answered)
        self.orders: dict[str, Order] = {}
        self._since: dict[str, float] = {}
        self.free_at = 0.0
        settings = place.settings
        self.reader = Reader(
            layout=EngineLayout("0" * 32, shape.tp, shape.pp, 0, FINGERPRINT, (self.cache.published(),)),
            make_agent=lambda: self.agent,
            ask=self.client.send,
            on_outcome=self._ended,
            deadlines=Deadlines(
                settings.handshake_timeout, settings.read_timeout, settings.ack_timeout, settings.hold_timeout
            ),
            clock=place.clock(),
        )
        # For an earlier read of that producer, for its description, and for its word, each a little late.
        self._patience = 2 * settings.handshake_timeout + settings.ack_timeout + WAIT_S + 3 * self.LOOK_S
        self.reader.open()
        self.handshake = Handshake(self.cache.published(self.agent.metadata()))
        self.name = self.handshake.worker.name
        self._released: set[str] = set()
        self._outcomes: list[Outcome] = []
        self._reported: set[tuple[str, str]] = set()
        self._poked = self._looking = False

    def execute(self, step: Step) -> None:
        """One step: the forward pass, then the hooks."""
        for work in step.work:
            request, blocks, span = work.request, work.blocks, work.span
            right = self.cache.holds(blocks, request.tokens, span.start)
            require(right, CONTENT, "{} attends to wrong KV on {} {}", request.request_id, self.core.host, self.name)
            self.cache.write(blocks, request.tokens, span)
        for address, incarnation in step.metadata.sighted:
            self.reader.meet(address, incarnation)
            self._poke()
        for order in step.metadata.loads:
            self.orders[order.request], self._since[order.request] = order, self.world.now
            self.reader.submit(order)
            self._poke()
        for name in step.metadata.released:
            self._report("sent", name)
        self._released.update(step.metadata.released)
        step.sent.append(self._released)
        step.received.append({outcome.order.request for outcome in self._outcomes})
        step.failed |= {outcome.order.request for outcome in self._outcomes if outcome.failure}
        self._released, self._outcomes = set(), []

    def _report(self, what: str, request: str) -> None:
        require((what, request) not in self._reported, "I3", "{} reports {} {} twice", self.name, request, what)
        self._reported.add((what, request))

    def where(self, request: str) -> str:
        """How far the load of a request is."""
        if request not in self.orders:
            return "none"
        if any(active.order.request == request for active in self.reader._reading):
            return "reading"
        messages = [message for message, _ in self.client.pending.values()]
        if any(isinstance(message, Follow) and message.claim == self.orders[request].claim for message in messages):
            return "following"
        waiting = (order for peer in self.reader._peers.values() for order, _ in peer.waiting)
        return "meeting" if any(order.request == request for order in waiting) else "acknowledging"

    def unrest(self) -> dict[str, Any]:
        """What is under way, wanted or kept."""
        left = {
            "orders": list(self.orders),
            "open": len(self.agent.open),
            "messages": [message for message, _ in self.client.pending.values()],
            "unreported": [*self._outcomes, *self._released],
        }
        return {where: what for where, what in left.items() if what}

    def _written(self, blocks: set[int]) -> None:
        ours = {block for order in self.orders.values() for block in self._loaded(order)}
        require(blocks <= ours, "I4", "a read writes blocks {} of {}, which are not being loaded", blocks, self.name)

    def _read(self, blocks: set[int]) -> None:
        """A read into these blocks has ended."""
        for name, order in self.orders.items():
            if blocks & self._loaded(order):
                self._since[name] = self.world.now
        self._poke()

    def _loaded(self, order: Order) -> set[int]:
        """Blocks that a load writes, without those that were found here."""
        return set(order.local_blocks[0][max(0, order.first_token) // self.cache.block_tokens :])

    def _poke(self) -> None:
        """There is something for the transfer thread to do."""
        if not self._poked:
            self._poked = True
            self.world.at(self.world.soon(self.THREAD_S), self._turn, self.core)

    def _turn(self) -> None:
        self._poked = False
        overdue = self.reader.overdue
        for _ in range(self.reader._inbox.qsize() + 1):
            self.reader.turn(0)
        if self.reader.overdue > overdue:
            self.world.cover("reader:reading", "overdue")
        if (self.reader._reading or self.reader._warming) and not self._looking:
            self._looking = True
            self.world.at(self.LOOK_S, self._look, self.core)

    def _look(self) -> None:
        self._looking = False
        self._poke()

    def _answered(self, message: Request, reply: Reply | None) -> None:
        kinds = {Hello: "meeting", Follow: "following"}
        self.world.cover(f"reader:{kinds.get(type(message), 'acknowledging')}", kind_of(reply))
        if isinstance(message, Follow):
            for name, order in self.orders.items():
                if order.claim == message.claim:
                    self._since[name] = self.world.now
        self._poke()

    def _ended(self, outcome: Outcome) -> None:
        order = self.orders.pop(outcome.order.request)
        busy = any(handle.blocks & self._loaded(order) for handle in self.agent.open)
        require(not busy, "I4", "{} reports {} while it is read", self.name, order.request)
        waited = self.world.now - self._since.pop(order.request)
        require(waited <= self._patience, "I8", "{} waited {} s to end {}", self.name, waited, order.request)
        self._report("received", order.request)
        result = outcome.failure or "held"
        self.world.tell("{} {}: load of {} ends: {}", self.core.host, self.name, order.request, result)
        self._outcomes.append(outcome)


def kind_of(reply: Reply | None) -> str:
    """What came of a message, in a word."""
    return "no answer" if reply is None else type(reply).__name__
