"""A load through engines that are killed and stopped all the while: every client is told the truth."""

import contextlib
import itertools
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from kvferry.cluster.dispatch import Dispatcher
from kvferry.cluster.transfers import read_transfers
from kvferry.errors import DispatchError

from .conftest import Fleet, Instance, Key
from .processes import API_SERVER, ENGINE_CORE, WORKER, family, send
from .waiting import assert_nothing_is_held

pytestmark = [pytest.mark.engines, pytest.mark.heavy, pytest.mark.timeout(1800)]

KIND = "qwen2"
PROMPTS, CONCURRENCY, SEED = 200, 16, 1912
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

    def _run(self) -> None:
        while not self._end.wait(STRIKE_EVERY_S):
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


@pytest.fixture
def instances(fleet: Fleet) -> tuple[list[Instance], Instance]:
    *producers, consumer = fleet.instances(
        Key(KIND, "tp=1", "kv_producer", 0, "recompute"),
        Key(KIND, "tp=1", "kv_producer", 1, "recompute"),
        Key(KIND, "tp=1", "kv_consumer", 0, "recompute"),
    )
    return producers, consumer


def test_hundreds_of_requests_among_kills_lose_nothing_silently(
    fleet: Fleet, instances: tuple[list[Instance], Instance]
) -> None:
    producers, consumer = instances
    source = random.Random(SEED)
    prompts = [[source.randint(10, 370) for _ in range(source.randint(20, 600))] for _ in range(PROMPTS)]
    expected = [fleet.dispatcher.complete(fleet.plain(KIND).url, prompt).tokens for prompt in prompts]
    earlier = len(read_transfers(consumer.transfer_log))
    numbers, end = itertools.count(), time.monotonic() + MOST_SECONDS
    with Dispatcher(deadline_s=ANSWER_S) as dispatcher:

        def one(number: int) -> str:
            said, prompt = "", prompts[number % PROMPTS]
            for producer in (producers[number % 2], producers[(number + 1) % 2]):
                try:
                    got = dispatcher.both_legs(producer.url, consumer.url, prompt)
                    return "right" if got.decode.tokens == expected[number % PROMPTS] else "wrong"
                except DispatchError as error:
                    said += str(error)
            return "hung" if "did not answer within" in said else "error"

        def client(_: int) -> Counter[str]:
            outcomes: Counter[str] = Counter()
            while (number := next(numbers)) < PROMPTS or (chaos.kills < KILLS and time.monotonic() < end):
                outcomes[one(number)] += 1
            return outcomes

        with Chaos(fleet, producers, source) as chaos, ThreadPoolExecutor(CONCURRENCY) as pool:
            outcomes = sum(pool.map(client, range(CONCURRENCY)), Counter())
    used = Counter(transfer.used for transfer in read_transfers(consumer.transfer_log)[earlier:])
    print(f"seed {SEED}: strikes {dict(chaos.strikes)}, answers {dict(outcomes)}, loads used {dict(used)}")
    assert set(outcomes) <= {"right", "error"}
    assert outcomes["right"] >= PROMPTS / 2
    assert chaos.kills >= KILLS
    assert used[True] > 0
    assert_nothing_is_held(*producers, consumer, within_s=30.0)
