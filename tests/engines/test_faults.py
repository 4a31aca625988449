"""Whatever fails on one side, the other lives, answers rightly or with an error status, and keeps nothing."""

import random
import signal
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from kvferry.cluster.dispatch import Completion, Dispatcher
from kvferry.cluster.transfers import await_transfers, read_transfers
from kvferry.errors import DispatchError
from kvferry.protocol.messages import Ack, Claim, Granted, Renew

from .conftest import DEADLINES, Fleet, Instance, Key
from .processes import ENGINE_CORE, WORKER, family, send
from .proxy import Proxy
from .waiting import assert_nothing_is_held, await_that, usage

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

KIND = "qwen2"
PROMPT_TOKENS = 300
LEASE_S = DEADLINES["kv_lease_duration"]
SETTLE_S = LEASE_S + 5.0
ANSWER_S = 90.0
WHOLE_INSTANCE = ""  # every title has that in it


@dataclass
class Parties:
    """A producer of two stages, and two consumers that differ in what they do about a load that failed."""

    fleet: Fleet
    producer: Instance
    consumers: list[Instance]
    source: random.Random
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(32))
    proxies: list[Proxy] = field(default_factory=list)

    def prompt(self) -> list[int]:
        return [self.source.randint(10, 370) for _ in range(PROMPT_TOKENS)]

    def expected(self, prompt: Sequence[int]) -> tuple[int, ...]:
        return self.fleet.dispatcher.complete(self.fleet.plain(KIND).url, prompt).tokens

    def proxy(self, params: dict[str, Any]) -> Proxy:
        self.proxies.append(Proxy((params["remote_host"], params["remote_port"])))
        return self.proxies[-1]

    def close(self) -> None:
        """Undo what a test that failed has left: held messages, and stopped processes that the next one would meet."""
        for instance in (self.producer, *self.consumers):
            send(family(instance), signal.SIGCONT)
        for proxy in self.proxies:
            proxy.close()
        self.pool.shutdown()


@pytest.fixture
def parties(fleet: Fleet) -> Iterator[Parties]:
    producer, *consumers = fleet.instances(
        Key(KIND, "pp=2", "kv_producer", variant="recompute"),
        Key(KIND, "tp=1", "kv_consumer", variant="recompute"),
        Key(KIND, "tp=1", "kv_consumer", variant="fail"),
    )
    parties = Parties(fleet, producer, consumers, random.Random(31))
    try:
        yield parties
    finally:
        parties.close()


@dataclass
class Attempt:
    """One request whose two legs are sent apart, so that something can happen in between."""

    parties: Parties
    consumer: Instance
    prompt: list[int] = field(init=False)
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self.prompt = self.parties.prompt()
        answer = self.parties.fleet.dispatcher.prefill(self.parties.producer.url, self.prompt, self.request_id)
        self.params: dict[str, Any] = answer.kv_transfer_params
        self.proxy = self.parties.proxy(self.params)

    def decode(self) -> "Future[Completion]":
        return self.parties.pool.submit(
            self.parties.fleet.dispatcher.decode,
            *(self.consumer.url, self.prompt, self.request_id, self.proxy.route(self.params)),
        )

    def decode_until(self, *kinds: type) -> "Future[Completion]":
        """The decode leg, up to where the consumer waits with these messages held back."""
        gates = [self.proxy.hold(kind) for kind in kinds]
        answer = self.decode()
        gates[0].await_arrivals(1)
        return answer


def _judge(attempt: Attempt, answer: "Future[Completion]") -> str:
    """``right``, or ``error`` where the client was told so. ``wrong`` and ``hung`` must never happen."""
    try:
        tokens = answer.result(ANSWER_S).tokens
    except DispatchError as error:
        return "hung" if "did not answer within" in str(error) else "error"
    return "right" if tokens == attempt.parties.expected(attempt.prompt) else "wrong"


def _assert_alive(*instances: Instance) -> None:
    for instance in instances:
        assert httpx.get(f"{instance.url}/health", timeout=10, trust_env=False).status_code == 200


def _assert_transfers_work(parties: Parties) -> None:
    for consumer in parties.consumers:
        prompt = parties.prompt()
        legs = parties.fleet.dispatcher.both_legs(parties.producer.url, consumer.url, prompt)
        assert legs.decode.tokens == parties.expected(prompt)
        moved = await_transfers(consumer.transfer_log, lambda t, i=legs.request_id: i in t.request, 1, 5.0)
        assert [transfer.result for transfer in moved.transfers] == ["held"]


def _log_says(instance: Instance, *words: str) -> bool:
    text = instance.managed.log.read_text(errors="replace")
    return any(all(word in line for word in words) for line in text.splitlines())


def _in_every_phase(parties: Parties) -> list[tuple[Attempt, "Future[Completion]"]]:
    """For each consumer four requests: before its ack, before it knows of its grant, reading, before its claim.

    What was prefilled is kept for one lease only, so each prompt is prefilled right before its decode leg.
    """
    under_way: list[tuple[Attempt, Future[Completion]]] = []
    for consumer in parties.consumers:
        for kind in (Ack, Granted):
            attempt = Attempt(parties, consumer)
            under_way.append((attempt, attempt.decode_until(kind)))
    reading = [Attempt(parties, consumer) for consumer in parties.consumers]
    claiming = [Attempt(parties, consumer) for consumer in parties.consumers]
    send(family(parties.producer, WORKER), signal.SIGSTOP)  # over TCP a read needs the worker it reads from
    under_way += [(attempt, attempt.decode()) for attempt in reading]
    under_way += [(attempt, attempt.decode_until(Claim)) for attempt in claiming]
    for attempt in reading:
        await_that(lambda a=attempt: _log_says(a.consumer, a.request_id, "has not ended"), 30.0, "an overdue read")
    return under_way


@pytest.mark.parametrize(
    "victim", [WORKER, ENGINE_CORE, WHOLE_INSTANCE], ids=["worker", "engine core", "whole instance"]
)
def test_a_killed_producer_costs_a_recomputation_or_an_honest_error_in_every_phase(
    parties: Parties, victim: str
) -> None:
    old = Attempt(parties, parties.consumers[0])
    under_way = _in_every_phase(parties)
    victims = family(parties.producer, victim)
    send(victims if victim == WHOLE_INSTANCE else victims[:1], signal.SIGKILL)
    for attempt, _ in under_way:
        attempt.proxy.open()
    verdicts = {attempt.request_id: _judge(attempt, answer) for attempt, answer in under_way}
    recomputing = [attempt for attempt, _ in under_way if attempt.consumer is parties.consumers[0]]
    assert [verdicts[attempt.request_id] for attempt in recomputing] == ["right"] * 4
    assert set(verdicts.values()) == {"right", "error"}, "the policy 'fail' must show as an error somewhere"
    _assert_alive(*parties.consumers)
    assert_nothing_is_held(*parties.consumers, within_s=SETTLE_S)
    await_that(lambda: not parties.producer.managed.running, ANSWER_S, "the rest of the producer ends too")
    parties.fleet.restart(parties.producer)
    _assert_transfers_work(parties)
    assert _judge(old, old.decode()) == "right"
    assert not [t for t in read_transfers(old.consumer.transfer_log) if old.request_id in t.request and t.used]


def test_a_killed_consumer_leaves_nothing_held_at_the_producer(parties: Parties) -> None:
    under_way = _in_every_phase(parties)
    for consumer in parties.consumers:
        send(family(consumer, "VLLM::")[::-1], signal.SIGKILL)
    send(family(parties.producer, WORKER), signal.SIGCONT)
    for attempt, answer in under_way:
        attempt.proxy.open()
        assert _judge(attempt, answer) == "error"
    _assert_alive(parties.producer)
    assert_nothing_is_held(parties.producer, within_s=SETTLE_S)
    for consumer in parties.consumers:
        parties.fleet.restart(consumer)
    _assert_transfers_work(parties)


def test_a_producer_stopped_for_longer_than_its_lease_serves_again_when_it_goes_on(parties: Parties) -> None:
    read, claiming = (Attempt(parties, parties.consumers[0]) for _ in range(2))
    acking = read.decode_until(Ack)
    everything = family(parties.producer)
    send(everything, signal.SIGSTOP)
    read.proxy.open()
    answers = [acking, claiming.decode()]
    try:
        assert [_judge(*pair) for pair in zip((read, claiming), answers, strict=True)] == ["right", "right"]
        time.sleep(LEASE_S)  # being stopped for so long is what is tested
    finally:
        send(everything, signal.SIGCONT)
    assert_nothing_is_held(parties.producer, *parties.consumers, within_s=SETTLE_S)
    _assert_transfers_work(parties)


def test_a_partition_longer_than_the_lease_costs_a_recomputation(parties: Parties) -> None:
    attempt = Attempt(parties, parties.consumers[0])
    answer = attempt.decode_until(Ack, Renew)
    assert_nothing_is_held(parties.producer, within_s=SETTLE_S)
    attempt.proxy.open()
    assert _judge(attempt, answer) == "right"
    moved = await_transfers(attempt.consumer.transfer_log, lambda t: attempt.request_id in t.request, 1, 5.0)
    assert not moved.transfers[0].used
    assert_nothing_is_held(*parties.consumers, within_s=SETTLE_S)
    _assert_transfers_work(parties)


def test_a_load_that_the_policy_lets_fail_is_an_error_whose_reason_the_consumer_logs(parties: Parties) -> None:
    """vLLM gives a request that failed a fixed text: no connector can put its reason into the client's message."""
    attempt = Attempt(parties, parties.consumers[1])
    answer = attempt.decode_until(Ack, Renew)
    assert_nothing_is_held(parties.producer, within_s=SETTLE_S)
    attempt.proxy.open()
    with pytest.raises(DispatchError, match=r"answered 500: .*Internal server error"):
        answer.result(ANSWER_S)
    assert _log_says(attempt.consumer, attempt.request_id, "failed:")
    assert_nothing_is_held(*parties.consumers, within_s=SETTLE_S)


def test_a_side_channel_that_is_cut_and_heals_is_used_again(parties: Parties) -> None:
    cut, later = (Attempt(parties, parties.consumers[0]) for _ in range(2))
    later.proxy = cut.proxy
    answer = cut.decode_until(Ack)
    cut.proxy.cut()
    assert _judge(cut, answer) == "right"
    cut.proxy.open()
    cut.proxy.heal()
    assert _judge(later, later.decode()) == "right"
    moved = await_transfers(later.consumer.transfer_log, lambda t: later.request_id in t.request, 1, 5.0)
    assert [transfer.result for transfer in moved.transfers] == ["held"]
    assert_nothing_is_held(parties.producer, *parties.consumers, within_s=SETTLE_S)


def test_a_prompt_that_nobody_fetches_is_freed_at_the_end_of_its_lease(parties: Parties) -> None:
    Attempt(parties, parties.consumers[0])
    assert usage(parties.producer) > 0
    assert_nothing_is_held(parties.producer, within_s=SETTLE_S)
    _assert_alive(parties.producer)


@pytest.mark.parametrize(
    "waiting_for", [Claim, Granted, Ack], ids=["before the claim", "before the grant", "before the ack"]
)
def test_a_request_whose_client_leaves_in_any_phase_leaves_nothing(parties: Parties, waiting_for: type) -> None:
    attempt = Attempt(parties, parties.consumers[0])
    gate = attempt.proxy.hold(waiting_for)
    _give_up(attempt)
    gate.await_arrivals(1)
    attempt.proxy.open()
    assert_nothing_is_held(parties.producer, *parties.consumers, within_s=SETTLE_S)
    _assert_alive(parties.producer, *parties.consumers)


def test_a_request_whose_client_leaves_during_the_read_leaves_nothing_once_the_read_has_ended(parties: Parties) -> None:
    attempt = Attempt(parties, parties.consumers[0])
    workers = family(parties.producer, WORKER)
    send(workers, signal.SIGSTOP)
    try:
        _give_up(attempt)
        await_that(lambda: _log_says(attempt.consumer, attempt.request_id, "has not ended"), 30.0, "an overdue read")
        assert usage(attempt.consumer) > 0, "what is being written to must not be given to somebody else"
    finally:
        send(workers, signal.SIGCONT)
    assert_nothing_is_held(parties.producer, *parties.consumers, within_s=SETTLE_S)
    _assert_transfers_work(parties)


def _give_up(attempt: Attempt) -> None:
    params = attempt.proxy.route(attempt.params)
    with Dispatcher(deadline_s=2.0) as impatient, pytest.raises(DispatchError, match="did not answer"):
        impatient.decode(attempt.consumer.url, attempt.prompt, attempt.request_id, params)
