"""The consumer worker's transfer thread: it owns the NIXL agent, meets producers, reads, and acknowledges.

A prefill that has finished is read at once. One that goes on is followed: what is ready is read while the rest is
computed, in whole blocks, until it is complete.

The engine's thread hands over orders and collects outcomes; it never waits. Nothing spins: the thread sleeps on its
inbox, and looks at reads under way every ``POLL_S``.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvferry.errors import LayoutError, TransferError
from kvferry.geometry import Descriptors, EngineLayout, ReadPlan, Span, WorkerShards, check, descriptors, left_out, plan
from kvferry.geometry import memory_regions as regions_of
from kvferry.protocol.loads import Order
from kvferry.protocol.messages import WAIT_S, Ack, Address, Follow, Gone, Granted, Held, Hello, Reply, Request, Welcome
from kvferry.protocol.subject import Subject
from kvferry.transport.nixl import POLL_S, Agent, Read

logger = logging.getLogger(__name__)

MOST_STRANGERS = 64
"""Peers that have not answered yet; beyond them nobody is met ahead of need. Anybody can make up addresses."""

MOST_REASONS = 3
"""Of a pair that cannot work, in a message: most of them repeat for every layer."""

Ranges = dict[tuple[str, int, str, int], Descriptors]
"""As ``descriptors`` gives them."""

Ask = Callable[[Address, Request, float, Callable[[Reply | None], None]], None]
"""Send a request to an address; the callback gets the reply, or None after so many seconds."""


@dataclass(frozen=True, slots=True)
class PartRead:
    """What was read from one producer worker."""

    worker: WorkerShards
    bytes: int
    descriptors: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one order on this worker.

    Attributes:
        failure: why the data must not be used; None when it was read whole and the producer held it all the while.
        seconds: from order to end.
        post_seconds: spent preparing and posting the reads.
        producer: what was read from; None when contact was never made.
        phases: seconds of each that there was, in their order: ``connect`` until there was a connection, ``follow``
            until the prefill had ended where it had not, ``read`` until every handle had ended, ``ack`` until the
            producer's word.
    """

    order: Order
    failure: str | None
    seconds: float
    post_seconds: float = 0.0
    producer: EngineLayout | None = None
    reads: tuple[PartRead, ...] = ()
    phases: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds: for a producer's description, for a read, for the answer to an acknowledgement, for a prefill to go on.

    A read cannot be taken back, so one that is overdue goes on holding its blocks. It is said, and until it ends
    nothing more is read from its producer: what comes meanwhile fails after the handshake's deadline.
    """

    handshake: float = 10.0
    read: float = 60.0
    ack: float = 10.0
    follow: float = 300.0


@dataclass(slots=True)
class _Peer:
    """A producer's incarnation.

    Attributes:
        layout: None until it has answered.
        since: when it was asked who it is.
        waiting: orders, with the time they came, for which there is no connection yet.
        active: orders being read or acknowledged.
        broken: something failed; once nothing is active it is forgotten, and what waits meets it anew.
    """

    address: Address
    since: float
    layout: EngineLayout | None = None
    plan: ReadPlan = field(default_factory=lambda: ReadPlan({}))
    agents: dict[int, str] = field(default_factory=dict)
    waiting: list[tuple[Order, float]] = field(default_factory=list)
    active: int = 0
    broken: bool = False


@dataclass(slots=True)
class _Posted:
    """A read from one of the producer's workers, and when it was posted."""

    worker: int
    read: Read
    since: float


@dataclass(slots=True, eq=False)
class _Active:
    """An order under way.

    Attributes:
        grant: the producer's last word on what may be read.
        life: of the grant, when it was read up to token ``at``.
        under_way, ended: its reads.
        following: the producer was asked what else is ready, and has not answered.
        news_at: when it last said something new.
    """

    order: Order
    peer: _Peer
    started: float
    grant: Granted
    life: int
    at: int
    post_seconds: float = 0.0
    overdue: bool = False
    following: bool = False
    news_at: float = 0.0
    under_way: list[_Posted] = field(default_factory=list)
    ended: list[_Posted] = field(default_factory=list)
    failure: str | None = None
    ends: dict[str, float] = field(default_factory=dict)

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase that has ended."""
        begins = [self.started, *self.ends.values()]
        return {phase: end - begin for begin, (phase, end) in zip(begins, self.ends.items(), strict=False)}

    @property
    def whole(self) -> bool:
        """All of it has been posted, from a prefill that has finished."""
        return self.grant.complete and self.life == self.grant.life and self.at >= self.order.last_token


@dataclass(slots=True)
class Reader:
    """Reads for one worker, on a thread of its own.

    Attributes:
        layout: this worker's engine as far as this worker knows it: itself.
        make_agent: called on the thread; the agent never leaves it.
        ask: the side channel.
        on_outcome: called on the thread, exactly once for each order.
        deadlines: how long to wait for a producer.
        on_start: called first on the thread, to bind it to a device.
        on_contact: called on the thread for each incarnation it got a connection to, with the seconds that took, its
            layout, and the drafter's layers that it does not hold.
        clock: seconds; only differences of it are used.
        overdue: reads so far that took longer than their deadline.
    """

    layout: EngineLayout
    make_agent: Callable[[], Agent]
    ask: Ask
    on_outcome: Callable[[Outcome], None]
    deadlines: Deadlines = Deadlines()
    on_start: Callable[[], None] = lambda: None
    on_contact: Callable[[float, EngineLayout, list[str]], None] = lambda *contact: None  # noqa: ARG005
    clock: Callable[[], float] = time.perf_counter
    overdue: int = field(default=0, init=False)
    # Not a SimpleQueue: in CPython 3.11 its get() with a timeout can wait for ever, when the thread is not run for
    # longer than that timeout between two looks at the clock.
    _inbox: queue.Queue[Callable[[], None] | None] = field(default_factory=queue.Queue)
    _peers: dict[str, _Peer] = field(default_factory=dict)
    _reading: list[_Active] = field(default_factory=list)
    _warming: list[tuple[str, Read]] = field(default_factory=list)
    _agent: Agent | None = None
    _metadata: bytes = b""
    _failed: BaseException | None = None
    _ready: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @property
    def me(self) -> WorkerShards:
        return self.layout.workers[0]

    def start(self, timeout: float = 60.0) -> bytes:
        """Start the thread, create the agent and register the cache; returns the agent's metadata.

        Raises:
            TransferError: NIXL did not start, refused the memory, or hung.
        """
        self._thread = threading.Thread(target=self._run, name="kvferry-transfer", daemon=True)
        self._thread.start()
        if not self._ready.wait(timeout):
            raise TransferError(f"NIXL did not start within {timeout:.0f} s")
        if self._failed:
            raise TransferError(f"the transfer thread could not start: {self._failed}") from self._failed
        return self._metadata

    def submit(self, order: Order) -> None:
        """Load what ``order`` says; ``on_outcome`` tells how it ended."""
        began = self.clock()
        self._inbox.put(lambda: self._begin(order, began))

    def meet(self, address: Address, incarnation: str) -> None:
        """A load from there may come: get to know each other ahead of it."""
        self._inbox.put(lambda: self._sight(address, incarnation))

    def close(self, timeout: float = 5.0) -> None:
        """End the thread; orders that have not ended get no outcome. Safe to call twice."""
        if self._thread is not None and self._thread.is_alive():
            self._inbox.put(None)
            self._thread.join(timeout)

    def _run(self) -> None:
        try:
            self.open()
        except BaseException as error:
            self._failed = error
            return
        finally:
            self._ready.set()
        while self.turn(POLL_S if self._reading or self._warming else None):
            pass

    def open(self) -> None:
        """Create the agent and register the cache, on the calling thread, which is then the one to call ``turn``."""
        self.on_start()
        self._agent = self.make_agent()
        self._agent.register(regions_of(self.me.shards))
        self._metadata = self._agent.metadata()

    def turn(self, wait: float | None) -> bool:
        """Handle what comes within ``wait`` seconds (None: whenever it comes), look at the reads; False once closed."""
        try:
            event = self._inbox.get(timeout=wait)
        except queue.Empty:
            event = self._poll
        if event is None:
            return False
        try:
            event()
            if self._reading or self._warming:
                self._poll()
        except Exception:
            logger.exception("the KVFerry transfer thread goes on after an error")
        return True

    # First contact

    def _begin(self, order: Order, began: float) -> None:
        peer = self._peers.get(order.incarnation) or self._meet(order.address, order.incarnation)
        if peer.layout is None or peer.broken:
            peer.waiting.append((order, began))
        else:
            self._advance(self._activate(peer, order, began))

    @staticmethod
    def _activate(peer: _Peer, order: Order, began: float) -> _Active:
        peer.active += 1
        return _Active(order, peer, began, order.grant, order.grant.life, order.first_token)

    def _sight(self, address: Address, incarnation: str) -> None:
        strangers = sum(peer.layout is None for peer in self._peers.values())
        if incarnation not in self._peers and strangers < MOST_STRANGERS:
            self._meet(address, incarnation)

    def _meet(self, address: Address, incarnation: str) -> _Peer:
        peer = self._peers[incarnation] = _Peer(address, self.clock())

        def on_reply(reply: Reply | None) -> None:
            self._inbox.put(lambda: self._met(incarnation, reply))

        self.ask(address, Hello(incarnation), self.deadlines.handshake, on_reply)
        return peer

    def _met(self, incarnation: str, reply: Reply | None) -> None:
        peer = self._peers[incarnation]
        waiting, peer.waiting = peer.waiting, []
        actives = [self._activate(peer, order, began) for order, began in waiting]
        try:
            self._connect(peer, incarnation, reply)
        except Exception as error:
            peer.broken = True
            for active in actives:
                self._fail(active, f"cannot load from {peer.address[0]}:{peer.address[1]}: {error}")
            if not actives:
                self._forget(incarnation)
            return
        assert peer.layout is not None
        self.on_contact(self.clock() - peer.since, peer.layout, left_out(peer.layout, self.layout))
        self._forget_idle(peer.address, incarnation)
        for active in actives:
            self._advance(active)

    def _connect(self, peer: _Peer, incarnation: str, reply: Reply | None) -> None:
        assert self._agent is not None
        if not isinstance(reply, Welcome) or reply.layout.incarnation != incarnation:
            why = reply.reason if isinstance(reply, Gone) else f"no answer within {self.deadlines.handshake:g} s"
            raise TransferError(f"handshake failed: {why}")
        reasons = check(reply.layout, self.layout)
        if reasons:
            more = f"; and {len(reasons) - MOST_REASONS} more" if len(reasons) > MOST_REASONS else ""
            raise TransferError("this pair cannot work: " + "; ".join(reasons[:MOST_REASONS]) + more)
        peer.plan = plan(reply.layout, self.me)
        for index in peer.plan.reads:
            peer.agents[index] = self._agent.connect(reply.layout.workers[index].agent)
        peer.layout = reply.layout
        self._warm_up(peer, incarnation)

    def _warm_up(self, peer: _Peer, incarnation: str) -> None:
        """Have the connections to a peer made now rather than by the first load."""
        assert self._agent is not None
        for index, pieces in peer.plan.reads.items():
            there = pieces[0].remote
            read = self._agent.touch(peer.agents[index], there.memory, there.device, there.address)
            self._warming.append((incarnation, read))
            peer.active += 1

    def _warmed(self) -> None:
        """Collect warm-up reads that have ended. A peer that does not even answer those is met anew."""
        assert self._agent is not None
        for entry in list(self._warming):
            incarnation, read = entry
            if self._agent.poll(read):
                self._warming.remove(entry)
                peer = self._peers[incarnation]
                peer.broken = peer.broken or read.error is not None
                self._leave(peer, incarnation)

    def _leave(self, peer: _Peer, incarnation: str) -> None:
        """Something under way with a peer has ended; one that is broken is forgotten with the last of it."""
        peer.active -= 1
        if peer.broken and not peer.active:
            self._forget(incarnation)
            for waiting in peer.waiting:
                self._begin(*waiting)

    def _forget_idle(self, address: Address, current: str) -> None:
        """Who answers at an address is the only one there: earlier incarnations will not come back."""
        for incarnation, peer in list(self._peers.items()):
            known = peer.address == address and incarnation != current and peer.layout is not None
            if known and not peer.active and not peer.waiting:
                self._forget(incarnation)

    def _forget(self, incarnation: str) -> None:
        assert self._agent is not None
        for agent in self._peers.pop(incarnation).agents.values():
            self._agent.disconnect(agent)

    # Reading

    def _advance(self, active: _Active) -> None:
        """Do what can be done for an order now: read what is ready, ask for the rest, or say that it has ended."""
        if "connect" not in active.ends:
            active.ends["connect"] = active.news_at = self.clock()
        if active.failure is None:
            self._post(active)
        if active.failure is None and not active.grant.complete and not active.following:
            self._follow(active)
        if active.under_way:
            if active not in self._reading:
                self._reading.append(active)
        elif active.failure is not None or active.whole:
            self._acknowledge(active)

    def _post(self, active: _Active) -> None:
        """Post reads of what has become ready: whole blocks, and the rest with the last."""
        assert self._agent is not None
        order, peer, grant = active.order, active.peer, active.grant
        if active.life != grant.life:
            if active.under_way:
                return  # what still arrives of the life that was lost must not arrive on top of the new one
            active.life, active.at = grant.life, order.first_token
        stop = min(grant.ready, order.last_token)
        if not grant.complete:
            stop -= stop % peer.plan.block_tokens
        if stop <= active.at:
            return
        began = self.clock()
        try:
            ranges = self._ranges(active, Span(active.at, stop))
        except Exception as error:
            active.failure = f"{type(error).__name__}: {error}"
            return
        for index, parts in ranges.items():
            active.under_way.append(_Posted(index, self._agent.read(peer.agents[index], parts), began))
        active.at = stop
        active.post_seconds += self.clock() - began

    @staticmethod
    def _ranges(active: _Active, tokens: Span) -> dict[int, Ranges]:
        """What is to be read of ``tokens`` from each of the producer's workers.

        Raises:
            LayoutError: the producer does not hold all of it, or no longer holds what was read earlier.
        """
        order, grant, pieces = active.order, active.grant, active.peer.plan.growing
        if grant.complete:
            earlier = Span(order.first_token, tokens.start)
            if earlier:  # of a window, vLLM may have let go of blocks after they were read
                for parts in pieces.values():
                    descriptors(parts, grant.blocks, order.local_blocks, earlier)
            pieces = active.peer.plan.reads
            if active.peer.plan.exact and order.last_token != grant.tokens:
                raise LayoutError(f"a state after token {order.last_token} is wanted, one after {grant.tokens} is held")
        return {index: descriptors(parts, grant.blocks, order.local_blocks, tokens) for index, parts in pieces.items()}

    def _follow(self, active: _Active) -> None:
        order, grant = active.order, active.grant
        active.following = True

        def on_reply(reply: Reply | None) -> None:
            self._inbox.put(lambda: self._followed(active, reply))

        message = Follow(order.incarnation, order.remote_request, order.claim, self.me.name, grant.life, grant.ready)
        self.ask(order.address, message, self.deadlines.ack + WAIT_S, on_reply)

    def _followed(self, active: _Active, reply: Reply | None) -> None:
        active.following = False
        if active.failure is not None:
            return
        if isinstance(reply, Granted):
            self._heard(active, reply)
        else:
            why = reply.reason if isinstance(reply, Gone) else f"no answer within {self.deadlines.ack:g} s"
            active.failure = f"the producer does not go on with the prefill: {why}"
        self._advance(active)

    def _heard(self, active: _Active, reply: Granted) -> None:
        """How far the prefill is. One that stands still may be waiting for the blocks that this load holds here."""
        now, before, active.grant = self.clock(), active.grant, reply
        if (reply.life, reply.ready) != (before.life, before.ready):
            active.news_at = now
        elif now - active.news_at > self.deadlines.follow:
            active.failure = f"the prefill has not gone on for {self.deadlines.follow:g} s"
        if reply.complete:
            active.ends["follow"] = now

    def _poll(self) -> None:
        self._warmed()
        for active in list(self._reading):
            self._collect(active)
            # Every handle must have ended before anything is said, also after the first failure.
            if active.under_way:
                self._look_at_the_clock(active)
            else:
                self._reading.remove(active)
                self._advance(active)

    def _collect(self, active: _Active) -> None:
        """Set aside the reads that have ended, well or badly."""
        assert self._agent is not None
        under_way = []
        for posted in active.under_way:
            if not self._agent.poll(posted.read):
                under_way.append(posted)
                continue
            active.ended.append(posted)
            if posted.read.error:
                active.peer.broken = True
                active.failure = active.failure or posted.read.error
        active.under_way = under_way

    def _look_at_the_clock(self, active: _Active) -> None:
        """A read cannot be taken back, but nothing more is asked of a producer whose read is overdue."""
        peer, now = active.peer, self.clock()
        if not active.overdue and now - active.under_way[0].since > self.deadlines.read:
            active.overdue = peer.broken = True
            self.overdue += 1
            logger.warning(
                "the read for %s has not ended after %g s; its blocks stay held until it does",
                Subject(active.order.request, self.layout.label, active.order),
                self.deadlines.read,
            )
        if peer.broken:
            late = [waiting for waiting in peer.waiting if now - waiting[1] > self.deadlines.handshake]
            peer.waiting = [waiting for waiting in peer.waiting if waiting not in late]
            for order, began in late:
                self._fail(self._activate(peer, order, began), "an earlier read from this producer does not end")

    def _acknowledge(self, active: _Active) -> None:
        active.ends["read" if "connect" in active.ends else "connect"] = self.clock()
        order = active.order

        def on_reply(reply: Reply | None) -> None:
            self._inbox.put(lambda: self._acknowledged(active, reply))

        ack = Ack(order.incarnation, order.remote_request, order.claim, self.me.name)
        self.ask(order.address, ack, self.deadlines.ack, on_reply)

    def _acknowledged(self, active: _Active, reply: Reply | None) -> None:
        if active.failure is None and not isinstance(reply, Held):
            why = reply.reason if isinstance(reply, Gone) else f"no answer within {self.deadlines.ack:g} s"
            active.failure = f"the producer does not vouch for what was read: {why}"
        self._end(active)

    def _fail(self, active: _Active, why: str) -> None:
        """Nothing was posted: tell the producer that this reader is done, and end."""
        active.failure = why
        self._acknowledge(active)

    def _end(self, active: _Active) -> None:
        peer, order = active.peer, active.order
        self._leave(peer, order.incarnation)
        parts = () if peer.layout is None else tuple(self._parts(active, peer.layout))
        active.ends["ack"] = self.clock()
        seconds = active.ends["ack"] - active.started
        self.on_outcome(Outcome(order, active.failure, seconds, active.post_seconds, peer.layout, parts, active.phases))

    @staticmethod
    def _parts(active: _Active, layout: EngineLayout) -> Iterator[PartRead]:
        for index in sorted({posted.worker for posted in active.ended}):
            reads = [posted.read for posted in active.ended if posted.worker == index]
            yield PartRead(
                layout.workers[index], sum(read.bytes for read in reads), sum(read.descriptors for read in reads)
            )
