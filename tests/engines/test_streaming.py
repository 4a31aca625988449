"""Both legs at once: prompts move while they are computed, and the answers are a plain engine's."""

import random
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from kvferry.cluster.dispatch import Completion, Sampling
from kvferry.cluster.launch import start_router
from kvferry.cluster.metrics import PrefixHits, total
from kvferry.cluster.ports import free_ports
from kvferry.cluster.supervisor import Supervisor
from kvferry.cluster.transfers import await_transfers, read_transfers
from kvferry.cluster.verification import TIE_BOUNDS, compare
from kvferry.gateway.health import Report
from kvferry.protocol.authentication import Seal
from kvferry.protocol.identity import draw
from kvferry.protocol.messages import Offer, Transfer

from .conftest import Fleet, Instance, Key
from .test_states import TIE
from .waiting import assert_nothing_is_held

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

KIND = "qwen2"
BLOCK = 128
REQUESTS, CONCURRENCY = 24, 8
LEASE_S = 30.0


@dataclass
class Pair:
    """Two engines with few blocks, a secret, and prompts prefilled 256 tokens at a time."""

    fleet: Fleet
    producer: Instance
    consumer: Instance
    kind: str = KIND

    def offer(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Parameters of both legs, as whoever sends them at once makes them."""
        text = httpx.get(f"{self.producer.url}/metrics", trust_env=False).content
        [(host, port, incarnation)] = Report.parse(text).side_channels
        transfer = Transfer(draw(), draw())
        secret = Seal(self.producer.spec.environment["KVFERRY_SECRET"].encode())
        offer = Offer.ahead((host, port), incarnation, transfer)
        return transfer.to_params(), offer.to_params(secret)

    def at_once(self, prompt: list[int], decoded: list[int] | None = None) -> Completion:
        first, second = self.offer()
        name = uuid.uuid4().hex
        with ThreadPoolExecutor(1) as pool:
            prefill = pool.submit(self.fleet.dispatcher.prefill, self.producer.url, prompt, name, None, first)
            answer = self.fleet.dispatcher.decode(self.consumer.url, decoded or prompt, name, second)
            prefill.result()
        return answer

    def assert_followed(self, prompt: list[int]) -> None:
        """Sent to both at once, all of it is read while it is computed, and the tokens are a plain engine's."""
        log = self.consumer.transfer_log
        earlier = len(read_transfers(log))
        assert self.at_once(prompt).tokens == self.plain(prompt)
        [moved] = await_transfers(log, lambda _: True, earlier + 1, deadline_s=5).transfers[earlier:]
        assert (moved.used, moved.tokens) == (True, len(prompt))
        text = httpx.get(f"{self.consumer.url}/metrics", trust_env=False).text
        assert 'phase="follow"' in text

    def plain(self, prompt: list[int]) -> tuple[int, ...]:
        return self.reference(prompt).tokens

    def reference(self, prompt: list[int]) -> Completion:
        return self.fleet.dispatcher.complete(self.fleet.plain(self.kind).url, prompt)


@pytest.fixture
def source(request: pytest.FixtureRequest) -> random.Random:
    """Of each test's own: a prompt that another test has used may be cached."""
    return random.Random(request.node.name)


@pytest.fixture
def pair(fleet: Fleet) -> Iterator[Pair]:
    producer, consumer = fleet.instances(
        Key(KIND, "pp=2", "kv_producer", variant="tight"), Key(KIND, "tp=1", "kv_consumer", variant="tight")
    )
    yield Pair(fleet, producer, consumer)
    # Well before the lease would end what nobody loads.
    assert_nothing_is_held(producer, consumer, within_s=LEASE_S / 3)


def _prompt(source: random.Random, tokens: int) -> list[int]:
    return [source.randint(10, 370) for _ in range(tokens)]


def _metric(instance: Instance, name: str) -> int:
    return total(httpx.get(f"{instance.url}/metrics", trust_env=False).text, name)


def test_a_long_prompt_is_followed_read_and_vouched_for(pair: Pair, source: random.Random) -> None:
    pair.assert_followed(_prompt(source, 7 * 256 + 100))


def test_a_queue_of_prompts_streams_between_engines_with_few_blocks(pair: Pair, source: random.Random) -> None:
    # Just short of a whole block: the answer needs one more, for which somebody may have to make room.
    prompts = [_prompt(source, BLOCK * source.randint(1, 6) - source.randint(1, 4)) for _ in range(REQUESTS)]
    before = _metric(pair.producer, "vllm:num_preemptions")
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        answers = [answer.tokens for answer in pool.map(pair.at_once, prompts)]
    assert answers == [pair.plain(prompt) for prompt in prompts]
    print("preemptions at prefill:", _metric(pair.producer, "vllm:num_preemptions") - before)
    assert PrefixHits.read(pair.consumer.url).external > 0


@pytest.mark.parametrize("where", ["producer", "consumer"])
@pytest.mark.parametrize("shared", [BLOCK, 3 * BLOCK, 700], ids=["one block", "three blocks", "whole"])
def test_what_one_side_has_cached_streams_all_the_same(
    pair: Pair, source: random.Random, shared: int, where: str
) -> None:
    first = _prompt(source, 700)
    prompt = first[:shared] + _prompt(source, 700 - shared)
    pair.fleet.dispatcher.complete(getattr(pair, where).url, first)
    assert pair.at_once(prompt).tokens == pair.plain(prompt)


OTHER_KINDS = [
    # Windows of one block; tokens that leave them are let go of while the prompt moves.
    ("gemma3", "tp=2", "pp=2", TIE_BOUNDS["float32"]),
    # States move with the last part, everything else before.
    ("lfm2", "pp=2", "tp=2", TIE),
]


@pytest.mark.heavy
@pytest.mark.parametrize(("kind", "prefill", "decode", "tie"), OTHER_KINDS, ids=[kind[0] for kind in OTHER_KINDS])
def test_windows_and_recurrent_states_stream(
    fleet: Fleet, source: random.Random, kind: str, prefill: str, decode: str, tie: float
) -> None:
    """One prompt by itself, then more at once than there are blocks for."""
    fleet.plain(kind)
    producer, consumer = fleet.instances(
        Key(kind, prefill, "kv_producer", variant="streaming"), Key(kind, decode, "kv_consumer", variant="streaming")
    )
    pair = Pair(fleet, producer, consumer, kind)
    alone, followed = _prompt(source, 7 * 256 + 100), _followed(pair)
    prompts = [_prompt(source, BLOCK * source.randint(1, 6) - source.randint(-1, 4)) for _ in range(REQUESTS)]
    answers = [pair.at_once(alone)]
    workers = consumer.spec.layout.workers
    moved = await_transfers(consumer.transfer_log, lambda _: True, workers, deadline_s=5).transfers
    assert [(transfer.used, transfer.tokens) for transfer in moved] == [(True, len(alone) - 1)] * workers
    assert _followed(pair) - followed == workers
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        answers += pool.map(pair.at_once, prompts)
    verdicts = [compare(pair.reference(p), a, tie) for p, a in zip([alone, *prompts], answers, strict=True)]
    assert [detail for verdict, detail in verdicts if not verdict.good] == []
    used = [transfer.used for transfer in read_transfers(consumer.transfer_log)]
    assert used.count(True) > len(used) / 2
    assert_nothing_is_held(producer, consumer, within_s=LEASE_S / 3)


def test_legs_with_different_prompts_are_answered_rightly(pair: Pair, source: random.Random) -> None:
    prompt, other = _prompt(source, 700), _prompt(source, 700)
    assert pair.at_once(prompt, other).tokens == pair.plain(other)


def test_a_decode_leg_without_a_prefill_leg_is_computed_here(pair: Pair, source: random.Random) -> None:
    prompt = _prompt(source, 300)
    _, second = pair.offer()
    answer = pair.fleet.dispatcher.decode(pair.consumer.url, prompt, uuid.uuid4().hex, second)
    assert answer.tokens == pair.plain(prompt)


def _given_up(url: str, body: dict[str, Any], patience_s: float) -> bool:
    """Send a request and leave before it is answered; False where the answer was quicker."""
    try:
        httpx.post(f"{url}/v1/completions", json=body, timeout=patience_s, trust_env=False)
    except httpx.TimeoutException:
        return True
    return False


@pytest.mark.parametrize("patience_s", [0.02, 0.05, 0.1])
def test_a_prefill_that_its_client_gives_up_in_the_middle_is_computed_here(
    pair: Pair, source: random.Random, patience_s: float
) -> None:
    prompt = _prompt(source, 7 * 256)
    first, second = pair.offer()
    body = {**Sampling(max_tokens=1).body("model", prompt), "kv_transfer_params": first}
    with ThreadPoolExecutor(1) as pool:
        decode = pool.submit(pair.fleet.dispatcher.decode, pair.consumer.url, prompt, uuid.uuid4().hex, second)
        print("given up:", _given_up(pair.producer.url, body, patience_s))
        assert decode.result().tokens == pair.plain(prompt)


@pytest.mark.parametrize("patience_s", [0.02, 0.05, 0.1])
def test_a_decode_that_its_client_gives_up_in_the_middle_leaves_nothing(
    pair: Pair, source: random.Random, patience_s: float
) -> None:
    prompt = _prompt(source, 7 * 256)
    first, second = pair.offer()
    body = {**Sampling().body("model", prompt), "kv_transfer_params": second}
    with ThreadPoolExecutor(1) as pool:
        prefill = pool.submit(pair.fleet.dispatcher.prefill, pair.producer.url, prompt, "given-up", None, first)
        print("given up:", _given_up(pair.consumer.url, body, patience_s))
        prefill.result()


@pytest.fixture
def router(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with Supervisor(tmp_path_factory.mktemp("router")) as supervisor:
        port, metrics_port = free_ports(2)
        yield start_router(supervisor, pair.producer.spec, pair.consumer.spec, (port, metrics_port), lambda *_: None)


def test_vllm_router_sends_both_legs_at_once_and_the_answers_are_right(
    pair: Pair, source: random.Random, router: str
) -> None:
    """It keeps who the producer is from its first answer on, and then waits for no other."""
    log = pair.consumer.transfer_log
    prompts = [_prompt(source, 7 * 256 + number) for number in range(4)]
    earlier, followed = len(read_transfers(log)), _followed(pair)
    for prompt in prompts:
        assert pair.fleet.dispatcher.complete(router, prompt).tokens == pair.plain(prompt)
    moved = await_transfers(log, lambda _: True, earlier + len(prompts), deadline_s=5).transfers[earlier:]
    assert [(transfer.used, transfer.tokens) for transfer in moved] == [(True, len(prompt)) for prompt in prompts]
    assert _followed(pair) - followed >= len(prompts) - 1


def _followed(pair: Pair) -> int:
    """Loads so far whose prefill had not ended when they began."""
    text = httpx.get(f"{pair.consumer.url}/metrics", trust_env=False).text
    lines = [line for line in text.splitlines() if line.startswith("kvferry:phase_seconds_count") and "follow" in line]
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines)


def test_an_offer_that_is_not_signed_is_not_followed(pair: Pair, source: random.Random) -> None:
    prompt = _prompt(source, 300)
    _, second = pair.offer()
    second["kvferry"]["mac"] = "00" * 32
    answer = pair.fleet.dispatcher.decode(pair.consumer.url, prompt, uuid.uuid4().hex, second)
    assert answer.tokens == pair.plain(prompt)
