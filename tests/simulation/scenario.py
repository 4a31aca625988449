"""One seed: engines, clients with good and bad manners, and everything that goes wrong; then peace, and quiet."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any
from unittest.mock import patch

from kvferry.protocol import grants
from kvferry.protocol.authentication import Seal
from kvferry.protocol.messages import WAIT_S, Ack, Address, Claim, Follow, Offer, Release, Renew, Transfer, encode
from kvferry.vllm import scheduler
from kvferry.vllm.settings import Settings

from . import invariants
from .engine import PORT, Core
from .invariants import Ledger, require
from .memory import Fabric, Tokens
from .network import Network, Weather
from .place import FINGERPRINT, Place, Shape
from .requests import SimulatedRequest
from .world import Party, ViolationError, World

SETTINGS = Settings(
    kv_lease_duration=3.0, claim_timeout=1.0, hold_timeout=4.0, handshake_timeout=1.0, read_timeout=2.0, ack_timeout=1.0
)

BUSY_S = 8.0
"""How long requests and trouble keep coming."""

_LIMITS = (
    *(SETTINGS.kv_lease_duration, SETTINGS.claim_timeout, SETTINGS.hold_timeout),
    *(SETTINGS.handshake_timeout, SETTINGS.read_timeout, SETTINGS.ack_timeout, WAIT_S),
)
PEACE_S = 3 * sum(_LIMITS)
"""How long everything may take to come to rest after that: all limits, and again for whoever waits behind others."""

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}

PROMPTS: tuple[Tokens, ...] = (
    (1, 2, 3, 4, 5, 6, 7),
    (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11),
    (1, 2, 3, 4, 9, 9),
    (5,),
    (7, 7, 7, 7, 7, 7, 7, 7),
    (8, 6, 4, 2, 1, 3, 5),
)
"""Some begin alike, some are of one length."""

ROLES = (
    ("kv_producer", "kv_consumer"),
    ("kv_producer", "kv_consumer", "kv_consumer"),
    ("kv_producer", "kv_producer", "kv_consumer"),
    ("kv_both", "kv_both"),
)

MANNERS = {
    "plain": 8,
    "streams": 12,
    "twins": 2,
    "rivals": 2,
    "replay": 3,
    "foreign": 2,
    "longer": 1,
    "broken": 2,
    "forgotten": 1,
    "local": 1,
}
"""What a client does with the parameters of its prefill, by weight."""


def greedy(prompt: Tokens, count: int) -> Tokens:
    """The sequence that the model makes of a prompt."""
    return prompt + tuple(20 + (sum(prompt) + index) % 7 for index in range(count))


class Host:
    """A machine where one engine core runs, dies, and is started again under the same address."""

    def __init__(self, place: Place, name: str, shape: Shape) -> None:
        self.name, self._place, self._shape = name, place, shape
        self.core = Core(place, name, shape)

    @property
    def address(self) -> Address:
        return self.name, PORT

    def restart(self) -> None:
        if not self.core.alive:
            self._place.world.tell("{} starts again", self.name)
            self.core = Core(self._place, self.name, self._shape)


class Scenario:
    """All of one seed."""

    def __init__(self, world: World) -> None:
        self.world, chance = world, world.random
        weather = Weather(
            delay=chance.choice((0.01, 0.05, 0.2)),
            late=chance.choice((0.0, 0.05, 0.3)),
            loss=chance.choice((0.0, 0.0, 0.05, 0.2)),
            repeats=chance.choice((0.0, 0.0, 0.1, 0.4)),
        )
        self.network = Network(world, weather)
        fabric = Fabric(world, self.network.connected, slowest=chance.choice((0.02, 0.3, 1.5, 4.0)))
        self.ledger = Ledger(world, SETTINGS.kv_lease_duration)
        place = Place(world, self.network, fabric, self.ledger, SETTINGS)
        roles = chance.choice(ROLES)
        # Private addresses: without a secret, others are not spoken to.
        self.hosts = [Host(place, f"10.0.0.{number + 1}", _shape(chance, role)) for number, role in enumerate(roles)]
        self.producers = [host for host, role in zip(self.hosts, roles, strict=True) if role != "kv_consumer"]
        self.consumers = [host for host, role in zip(self.hosts, roles, strict=True) if role != "kv_producer"]
        self.requests: list[SimulatedRequest] = []
        self._seen: list[tuple[Tokens, dict[str, Any]]] = []
        self._gone: set[str] = set()
        world.watch = self._watch

    def run(self) -> None:
        """Trouble for a while, then peace until nothing is left."""
        chance = self.world.random
        for _ in range(chance.randint(4, 12)):
            self.world.at(self.world.soon(BUSY_S), self._client)
        for trouble, most in ((self._cut, 2), (self._kill, 2), (self._abort, 4), (self._preempt, 8), (self._attack, 4)):
            for _ in range(chance.randint(0, most)):
                self.world.at(self.world.soon(BUSY_S), trouble)
        self.world.run(BUSY_S)
        self._make_peace()
        while unrest := self._unrest():
            require(self.world.now < BUSY_S + PEACE_S, "I8", "no rest: {}", unrest)
            self.world.run(self.world.now + 1.0)
        for host in self.hosts:
            for worker in host.core.workers:
                require(worker.cache.intact(), "I1", "{} {}: a write missed the cache", host.name, worker.name)
        unended = [request.request_id for request in self.requests if request.ended is None]
        require(not unended, "I3", "{} never ended", unended)

    # Clients

    def _client(self) -> None:
        """Prefill somewhere, then decode somewhere, as routers do."""
        chance = self.world.random
        (manner,) = chance.choices(list(MANNERS), list(MANNERS.values()))
        prompt = chance.choice(PROMPTS)
        if manner == "streams":
            self._both_legs(prompt)
            return
        if manner == "local":
            self._submit(chance.choice(self.hosts), prompt, None, chance.randint(1, 6))
            return

        def prefilled(how: str, params: dict[str, Any] | None) -> None:
            wait = chance.choice((0.0, 0.3, 0.3, 4.0))
            self.world.at(self.world.soon(wait), lambda: self._decode(manner, prompt, params))

        self._submit(chance.choice(self.producers), prompt, dict(PREFILL), 1, prefilled)

    def _both_legs(self, prompt: Tokens) -> None:
        """Send both legs of a transfer that streams, in any order, sometimes with another prompt or twice."""
        chance = self.world.random
        producer = chance.choice(self.producers)
        transfer = Transfer(_draw(chance), _draw(chance))
        names = (transfer.name, producer.core.incarnation, transfer.nonce, None, None)
        offer = Offer(*producer.address, "engine", *names).to_params(Seal())
        decoded = chance.choice((prompt, prompt, prompt, prompt, (*prompt, 17), chance.choice(PROMPTS)))
        where = chance.choice(self.consumers)
        legs = [
            partial(self._submit, producer, prompt, transfer.to_params(), 1),
            *[partial(self._submit, where, decoded, offer, chance.randint(1, 6))] * chance.choice((1, 1, 1, 2)),
        ]
        for leg in legs:
            if chance.random() < 0.95:
                self.world.at(self.world.soon(chance.choice((0.0, 0.1, 3.0))), leg)

    def _decode(self, manner: str, prompt: Tokens, params: dict[str, Any] | None) -> None:
        chance = self.world.random
        if params is not None:
            self._seen.append((prompt, params))
        match manner:
            case "forgotten":
                return
            case "replay" if self._seen:
                prompt, params = chance.choice(self._seen)
            case "foreign":
                prompt = chance.choice(PROMPTS)
            case "longer":
                prompt = (*prompt, 17)
            case "broken" if params is not None:
                params = _broken(chance, params)
        where = chance.choice(self.consumers)
        self._submit(where, prompt, params, chance.randint(1, 6))
        if manner in ("twins", "rivals"):
            rival = where if manner == "twins" else chance.choice(self.consumers)
            again = partial(self._submit, rival, prompt, params, chance.randint(1, 6))
            self.world.at(self.world.soon(chance.choice((0.0, 1.0))), again)

    def _submit(
        self,
        host: Host,
        prompt: Tokens,
        params: dict[str, Any] | None,
        count: int,
        on_end: Callable[[str, dict[str, Any] | None], None] = lambda how, params: None,
    ) -> None:
        if not host.core.alive:
            return
        name = f"r{len(self.requests)}"
        request = SimulatedRequest(name, greedy(prompt, count), len(prompt), params, self.world.now, on_end)
        self.requests.append(request)
        host.core.add(request)

    # Trouble

    def _cut(self) -> None:
        """Two hosts do not reach each other for a while, often for longer than a lease."""
        pair = frozenset(host.name for host in self.world.random.sample(self.hosts, 2))
        self.world.tell("partition of {}", sorted(pair))
        self.network.cuts.add(pair)
        self.world.at(self.world.soon(self.world.random.choice((1.0, 6.0))), lambda: self.network.cuts.discard(pair))

    def _kill(self) -> None:
        host = self.world.random.choice(self.hosts)
        if host.core.alive:
            host.core.kill()
            self.world.at(self.world.soon(self.world.random.choice((0.1, 4.0))), host.restart)

    def _abort(self) -> None:
        core, request = self._some_request()
        if request is not None:
            core.abort(request)

    def _preempt(self) -> None:
        """Of some host, or of one where a prefill is followed."""
        hosts = [host for host in self.producers if host.core.alive and host.core.open_grants] or self.hosts
        self.world.random.choice(hosts).core.preempt_next = True

    def _some_request(self) -> tuple[Core, SimulatedRequest | None]:
        core = self.world.random.choice(self.hosts).core
        live = [request for request in core.requests.values() if core.alive and not request.finished]
        return core, self.world.random.choice(live) if live else None

    def _attack(self) -> None:
        """Somebody who knows request ids and incarnations, but neither a nonce nor a claim, or speaks gibberish."""
        chance = self.world.random
        host = chance.choice(self.producers)
        names = [*host.core.grants, *host.core.open_grants, "r0"]
        incarnation, request, guess = host.core.incarnation, chance.choice(names), _draw(chance)
        body = chance.choice(
            [
                encode(Claim(incarnation, request, guess, guess, guess, ["pp0tp0"], 7, guess, chance.random() < 0.5)),
                encode(Follow(incarnation, request, guess, "pp0tp0", 0, 0)),
                encode(Ack(incarnation, request, guess, "pp0tp0")),
                encode(Renew(incarnation, [(request, guess)])),
                encode(Release(incarnation, request, guess, guess)),
                chance.randbytes(chance.randint(0, 40)),
                encode({"type": "Claim", "request": {}}),
            ]
        )
        self.network.request("attacker", host.address, body, lambda reply: None)

    # Peace

    def _make_peace(self) -> None:
        self.world.tell("peace")
        self.network.cuts.clear()
        self.network.weather.loss = 0.0
        for host in self.hosts:
            # Somebody who is dead may stay so.
            if self.world.chance(0.7):
                host.restart()

    def _unrest(self) -> dict[str, Any]:
        """What keeps which host from rest."""
        left = {host.name: host.core.unrest() for host in self.hosts if host.core.alive}
        return {name: unrest for name, unrest in left.items() if unrest}

    def _watch(self, party: Party | None) -> None:
        """Look at the engine core that an event was about, or at all where that is not known."""
        for host in self.hosts:
            if host.core.alive and party in (None, host.core):
                invariants.watch(host.core)


def _shape(chance: Random, role: Any) -> Shape:
    tp, pp, dcp = chance.choice(((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 1), (2, 2, 1), (4, 1, 2)))
    tokens = chance.choice((2, 4))
    return Shape(
        role=role,
        tp=tp,
        pp=pp,
        dcp=dcp,
        interleave=chance.choice((1, tokens // dcp)),
        blocks=chance.choice((10, 16, 24)) * 4 // tokens // 2 + 1,
        block_tokens=tokens,
        depth=chance.choice((1, pp)),
        policy=chance.choice(("recompute", "fail")),
        pause=chance.choice((0.1, 0.3)),
        chunk=chance.choice((2, 5)),
    )


def _broken(chance: Random, params: dict[str, Any]) -> dict[str, Any]:
    """Parameters with one value changed: to another of its kind, or to nonsense."""
    ours = dict(params["kvferry"])
    broken = {**params, "kvferry": ours}
    key = chance.choice(["remote_host", "remote_port", "remote_num_tokens", "remote_request_id", *ours])
    where = ours if key in ours else broken
    other = {"remote_host": "10.0.0.9", "remote_port": 9, "remote_num_tokens": 3, "remote_request_id": "r1"}
    where[key] = chance.choice([None, {}, -1, "x", other.get(key, _draw(chance)), other.get(key, _draw(chance))])
    return broken


def _draw(chance: Random) -> str:
    return f"{chance.getrandbits(128):032x}"


class _Alarm(logging.Handler):
    """A thread that caught an exception and goes on is a violation here."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, ViolationError):
            raise error
        raise ViolationError(f"I7: {record.getMessage()}: {error!r}") from error


@contextmanager
def _determined(world: World) -> Iterator[None]:
    """Names that nobody can guess come from the seed, and errors that are logged are raised."""
    log, alarm = logging.getLogger("kvferry"), _Alarm(logging.ERROR)
    propagate, log.propagate = log.propagate, False
    log.addHandler(alarm)
    try:
        with ExitStack() as stack:
            for module in (grants, scheduler):
                stack.enter_context(patch.object(module, "draw", partial(_draw, world.random)))
            stack.enter_context(patch.object(scheduler, "fingerprint", lambda *_: FINGERPRINT))
            yield
    finally:
        log.removeHandler(alarm)
        log.propagate = propagate


@dataclass
class Result:
    """What a seed came to.

    Attributes:
        coverage: how often which event met a party in which state.
        ends: how requests ended.
        rest: seconds of simulated time from the end of the trouble until nothing was left.
    """

    coverage: Counter[tuple[str, str]]
    ends: Counter[str]
    rest: float

    def __add__(self, other: Result) -> Result:
        return Result(self.coverage + other.coverage, self.ends + other.ends, max(self.rest, other.rest))


def simulate(seed: int, trace: Callable[[str], None] | None = None) -> Result:
    """Run one seed.

    Raises:
        ViolationError: a rule was broken.
    """
    world = World(seed, trace)
    with _determined(world):
        scenario = Scenario(world)
        scenario.run()
    return Result(world.coverage, Counter(str(request.ended) for request in scenario.requests), world.now - BUSY_S)
