"""The side channel without sockets: the interfaces of ``Listener`` and ``Client`` over a network that may do anything.

Messages are encoded and decoded as on a wire. They are late, lost, repeated, overtaken, and held up by partitions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.errors import MessageError
from kvferry.protocol.messages import Address, Reply, Request, decode_reply, decode_request, encode

from .world import Party, World

LONGEST_WAIT_S = 1.0
LONGEST_TURN_S = 0.1
"""Until a thread gets round to what it was called for, on a machine that has much else to do; seldom far longer."""
ROUNDING_S = 0.001


@dataclass
class Weather:
    """How messages fare.

    Attributes:
        delay: seconds that a message usually takes at most.
        late: share of messages that take ten times that.
        loss, repeats: share of messages that are lost, that arrive twice.
    """

    delay: float = 0.05
    late: float = 0.0
    loss: float = 0.0
    repeats: float = 0.0


class Network:
    """Carries bytes between hosts.

    Attributes:
        listeners: who listens where now.
        cuts: pairs of hosts that do not reach each other.
    """

    RETRY_S = 0.3

    def __init__(self, world: World, weather: Weather) -> None:
        self.world, self.weather = world, weather
        self.listeners: dict[Address, Listener] = {}
        self.cuts: set[frozenset[str]] = set()

    def connected(self, one: str, other: str) -> bool:
        return frozenset((one, other)) not in self.cuts

    def request(self, source: str, address: Address, body: bytes, answer: Callable[[bytes | None], None]) -> None:
        """Carry ``body`` to whoever listens at ``address`` when it arrives.

        ``answer`` gets the reply, maybe twice, or None when the connection is seen to break.
        """

        def arrive() -> None:
            listener = self.listeners.get(address)
            if listener is not None and listener.party.alive:
                listener.receive(body, lambda reply: self._carry(address[0], source, lambda: answer(reply), lose))
            else:
                lose()

        def lose() -> None:
            if self.world.chance(0.5):
                answer(None)

        self._carry(source, address[0], arrive, lose)

    def _carry(self, source: str, target: str, arrive: Callable[[], None], lose: Callable[[], None]) -> None:
        world, weather = self.world, self.weather

        def land() -> None:
            if self.connected(source, target):
                arrive()
            elif world.chance(0.9):
                world.at(self.RETRY_S, land, arrives=target)
            else:
                lose()

        if world.chance(weather.loss):
            world.tell("network: lost between {} and {}", source, target)
            world.at(world.soon(weather.delay), lose)
            return
        for _ in range(2 if world.chance(weather.repeats) else 1):
            slow = weather.delay * (10 if world.chance(weather.late) else 1)
            world.at(world.soon(slow), land, arrives=target)


class Thread:
    """A thread that calls ``tick`` after everything it does, and again when ``tick`` wishes."""

    def __init__(self, world: World, party: Party, tick: Callable[[], float | None]) -> None:
        self._world, self._party, self._tick = world, party, tick
        self._turn = 0
        world.at(0, self.turn, party)

    def turn(self) -> None:
        wish = self._tick()
        self._turn += 1
        turn = self._turn
        wait = ROUNDING_S + min(LONGEST_WAIT_S, LONGEST_WAIT_S if wish is None else max(0.0, wish))
        self._world.at(wait, lambda: self._again(turn), self._party)

    def _again(self, turn: int) -> None:
        if turn == self._turn:
            self.turn()


class Listener:
    """Stands for ``kvferry.sidechannel.server.Listener``."""

    def __init__(
        self,
        network: Network,
        party: Party,
        address: Address,
        answer: Callable[[Request, Callable[[bytes], None]], bytes | None],
        tick: Callable[[], float | None],
    ) -> None:
        self.party, self.port = party, address[1]
        self._world, self._answer = network.world, answer
        self._thread = Thread(network.world, party, tick)
        network.listeners[address] = self

    def receive(self, body: bytes, respond: Callable[[bytes], None]) -> None:
        try:
            message = decode_request(body)
        except MessageError:
            self._world.cover("listener", "gibberish")
        else:
            reply = self._answer(message, respond)
            if reply is not None:
                respond(reply)
        self._thread.turn()

    def close(self) -> None:
        """Nothing holds a port here."""


class Client:
    """Stands for ``kvferry.sidechannel.client.Client``.

    Args:
        on_end: told every message and how it ended, just before whoever sent it is.
    """

    def __init__(
        self,
        network: Network,
        host: str,
        party: Party,
        tick: Callable[[], float | None] | None,
        on_end: Callable[[Request, Reply | None], None],
    ) -> None:
        self._network, self._world, self._host, self._party = network, network.world, host, party
        self.pending: dict[int, tuple[Request, Callable[[Reply | None], None]]] = {}
        self._numbers = itertools.count()
        self._on_end = on_end
        self._thread = Thread(network.world, party, tick) if tick else None

    def send(
        self, address: Address, message: Request, timeout: float, on_reply: Callable[[Reply | None], None]
    ) -> None:
        number = next(self._numbers)
        self.pending[number] = message, on_reply
        self._network.request(self._host, address, encode(message), lambda body: self._receive(number, body))
        self._world.at(timeout, lambda: self._end(number, None), self._party)
        self.wake()

    def call(self, function: Callable[[], None]) -> bool:
        longest = LONGEST_TURN_S * (30 if self._world.chance(0.02) else 1)
        self._world.at(self._world.soon(longest), function, self._party, arrives=self._host)
        return True

    def wake(self) -> None:
        if self._thread:
            self._world.at(0, self._thread.turn, self._party)

    def close(self) -> None:
        """Nothing is left open here."""

    def _receive(self, number: int, body: bytes | None) -> None:
        if self._party.alive:
            self._end(number, None if body is None else decode_reply(body))

    def _end(self, number: int, reply: Reply | None) -> None:
        if number in self.pending:
            message, on_reply = self.pending.pop(number)
            self._on_end(message, reply)
            on_reply(reply)
            if self._thread:
                self._thread.turn()
