"""A load through engines that are killed and stopped all the while: every client is told the truth."""

import contextlib
import itertools
import json
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from kvferry.cluster.dispatch import Dispatcher, Sampling
from kvferry.cluster.launch import start_gateway
from kvferry.cluster.ports import free_ports
from kvferry.cluster.supervisor import Supervisor
from kvferry.cluster.transfers import read_transfers
from kvferry.errors import DispatchError

from .conftest import Fleet, Instance, Key
from .processes import API_SERVER, ENGINE_CORE, WORKER, family, send
from .waiting import assert_nothing_is_held

pytestmark = [pytest.mark.engines, pytest.mark.heavy, pytest.mark.timeout(1800)]

KIND = "qwen2"
CONCURRENCY, SEED = 16, 1912
KILLS, MOST_SECONDS = 3, 600.0
STRIKE_EVERY_S = 4.0
STOPPED_S = 1.5
ANSWER_S = 120.0


@dataclass
class Chaos:
    """Every few seconds kills a part of one of the instances, or stops it for a moment; what died is started again."""

    fleet: Fleet
    victims: list[Instance]
    source: random.Random
    strikes: Counter[str] = field(default_factory=Counter)
    _end: threading.Event = field(default_factory=threading.Event)
    _striking: threading.Condition = field(default_factory=threading.Condition)
    _restarts: dict[str, "Future[None]"] = field(default_factory=dict)
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(4))

    def __enter__(self) -> "Chaos":
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        for restart in self._restarts.values():
            restart.result()
        self._pool.shutdown()

    @property
    def kills(self) -> int:
        return sum(number for how, number in self.strikes.items() if how != "stop")

    def await_strike(self) -> None:
        """Until the next one begins."""
        with self._striking:
            self._striking.wait(2 * STRIKE_EVERY_S)

    def _run(self) -> None:
        while not self._end.wait(STRIKE_EVERY_S):
            with self._striking:
                self._striking.notify_all()
            up = [victim for victim in self.victims if self._is_up(victim)]
            # One at a time is dead, so that what is told apart is a failure from an outage.
            ways = [WORKER, ENGINE_CORE, API_SERVER, "stop"] if len(up) == len(self.victims) else ["stop"]
            self._strike(self.source.choice(up), self.source.choice(ways))

    def _is_up(self, victim: Instance) -> bool:
        return victim.spec.name not in self._restarts or self._restarts[victim.spec.name].done()

    def _strike(self, victim: Instance, how: str) -> None:
        self.strikes[how] += 1
        if how == "stop":
            processes = family(victim)
            send(processes, signal.SIGSTOP)
            self._end.wait(STOPPED_S)
            send(processes, signal.SIGCONT)
            return
        send(family(victim, how)[:1], signal.SIGKILL)
        self._restarts[victim.spec.name] = self._pool.submit(self._restart, victim)

    def _restart(self, victim: Instance) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            victim.managed.process.wait(30)
        self.fleet.restart(victim)


def _instances(fleet: Fleet, role: str, number: int) -> list[Instance]:
    return fleet.instances(*(Key(KIND, "tp=1", role, copy, "recompute") for copy in range(number)))


def _prompts(source: random.Random, number: int) -> list[list[int]]:
    return [[source.randint(10, 370) for _ in range(source.randint(20, 600))] for _ in range(number)]


def _load(chaos: Chaos, requests: int, one: Callable[[int], str]) -> Counter[str]:
    """How so many requests or more ended, side by side, as many as it takes for ``KILLS``."""
    numbers, end = itertools.count(), time.monotonic() + MOST_SECONDS

    def client(_: int) -> Counter[str]:
        outcomes: Counter[str] = Counter()
        while (number := next(numbers)) < requests or (chaos.kills < KILLS and time.monotonic() < end):
            outcomes[one(number % requests)] += 1
            if number >= requests:
                chaos.await_strike()  # a load without pause would starve the engine that is starting
        return outcomes

    with chaos, ThreadPoolExecutor(CONCURRENCY) as pool:
        return sum(pool.map(client, range(CONCURRENCY)), Counter())


def _assert_honest(
    chaos: Chaos, outcomes: Counter[str], requests: int, consumers: list[Instance], earlier: int
) -> None:
    used = _used(consumers) - earlier
    print(f"seed {SEED}: strikes {dict(chaos.strikes)}, answers {dict(outcomes)}, loads used {used}")
    assert set(outcomes) <= {"right", "error"}
    assert outcomes["right"] >= requests / 2
    assert chaos.kills >= KILLS
    assert used > 0


def _used(consumers: list[Instance]) -> int:
    return sum(t.used for consumer in consumers for t in read_transfers(consumer.transfer_log))


def test_hundreds_of_requests_among_kills_lose_nothing_silently(fleet: Fleet) -> None:
    source, requests = random.Random(SEED), 200
    producers, [consumer] = _instances(fleet, "kv_producer", 2), _instances(fleet, "kv_consumer", 1)
    prompts = _prompts(source, requests)
    expected = [fleet.dispatcher.complete(fleet.plain(KIND).url, prompt).tokens for prompt in prompts]
    earlier = _used([consumer])
    with Dispatcher(deadline_s=ANSWER_S) as dispatcher:

        def one(number: int) -> str:
            said = ""
            for producer in (producers[number % 2], producers[(number + 1) % 2]):
                try:
                    got = dispatcher.both_legs(producer.url, consumer.url, prompts[number])
                    return "right" if got.decode.tokens == expected[number] else "wrong"
                except DispatchError as error:
                    said += str(error)
            return "hung" if "did not answer within" in said else "error"

        chaos = Chaos(fleet, producers, source)
        outcomes = _load(chaos, requests, one)
    _assert_honest(chaos, outcomes, requests, [consumer], earlier)
    assert_nothing_is_held(*producers, consumer, within_s=30.0)


def test_hundreds_of_requests_through_the_gateway_among_kills_of_either_side_are_answered_honestly(
    fleet: Fleet, tmp_path: Path
) -> None:
    source, requests = random.Random(SEED + 1), 300
    producers, consumers = _instances(fleet, "kv_producer", 2), _instances(fleet, "kv_consumer", 2)
    prompts = _prompts(source, requests)
    expected = [fleet.dispatcher.complete(fleet.plain(KIND).url, prompt).tokens for prompt in prompts]
    earlier = _used(consumers)
    with (
        Supervisor(tmp_path) as supervisor,
        httpx.Client(timeout=ANSWER_S, trust_env=False) as client,
    ):
        specs = [[instance.spec for instance in side] for side in (producers, consumers)]
        gateway = start_gateway(supervisor, *specs, *free_ports(1), lambda *_: None)

        def one(number: int) -> str:
            body = {**Sampling().body("model", prompts[number]), "stream": bool(number % 2)}
            try:
                answer = client.post(f"{gateway}/v1/completions", json=body)
            except httpx.TimeoutException:
                return "hung"
            return _judged(answer, expected[number])

        chaos = Chaos(fleet, [*producers, *consumers], source)
        outcomes = _load(chaos, requests, one)
    _assert_honest(chaos, outcomes, requests, consumers, earlier)
    assert_nothing_is_held(*producers, *consumers, within_s=30.0)


def _judged(answer: httpx.Response, expected: tuple[int, ...]) -> str:
    """``dishonest`` is a client error, or a stream that neither ends as it should nor says what went wrong."""
    if answer.status_code != 200:
        return "error" if answer.status_code >= 500 and answer.json()["error"]["message"] else "dishonest"
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return "right" if tuple(answer.json()["choices"][0]["token_ids"]) == expected else "wrong"
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    if "error" in events[-1]:
        return "error"
    tokens = [token for event in events for choice in event["choices"] for token in choice["token_ids"]]
    return ("right" if tuple(tokens) == expected else "wrong") if lines[-1] == "[DONE]" else "dishonest"
