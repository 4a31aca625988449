"""Parameters as nobody should send them, and pairs that cannot work: answered by computing, or refused by vLLM."""

import random
import socket
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from kvferry.cluster.transfers import await_transfers, read_transfers
from kvferry.errors import DispatchError

from .conftest import Fleet, Instance, Key

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

KIND = "qwen2"
PROMPT_TOKENS = 200  # a whole block and a part of one
VALUES = [None, [], {"a": [1]}, True, -1, 10**30, 1.5, "", "x" * 10_000, "127.0.0.1"]
FOREIGN = [
    {"do_remote_prefill": True, "remote_engine_id": "x", "remote_block_ids": [[1, 2]], "remote_host": "127.0.0.1"},
    {"do_remote_prefill": "yes"},
    {"do_remote_prefill": True, "kvferry": {"version": 99}},
]


def _broken(valid: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every key missing, and with every value that it should not have; in the end those of other connectors."""
    for key in valid:
        rest = {name: value for name, value in valid.items() if name != key}
        yield f"{key} missing", rest
        yield from ((f"{key}={value!r:.20}", {**rest, key: value}) for value in VALUES)
    own = valid["kvferry"]
    for key in own:
        rest = {name: value for name, value in own.items() if name != key}
        yield f"kvferry.{key} missing", {**valid, "kvferry": rest}
        yield from ((f"kvferry.{key}={value!r:.20}", {**valid, "kvferry": {**rest, key: value}}) for value in VALUES)
    yield from ((f"foreign {number}", params) for number, params in enumerate(FOREIGN))


@pytest.fixture
def source() -> random.Random:
    return random.Random(77)


def _prompt(source: random.Random) -> list[int]:
    return [source.randint(10, 370) for _ in range(PROMPT_TOKENS)]


def _pair(fleet: Fleet) -> tuple[Instance, Instance]:
    producer, consumer = fleet.instances(
        Key(KIND, "pp=2", "kv_producer", variant="recompute"), Key(KIND, "tp=1", "kv_consumer", variant="recompute")
    )
    return producer, consumer


def _outcome(fleet: Fleet, consumer: Instance, prompt: list[int], params: Any) -> str:
    """``right``, ``refused`` (vLLM answers with a client error), or what went wrong."""
    try:
        got = fleet.dispatcher.decode(consumer.url, prompt, uuid.uuid4().hex, params)
    except DispatchError as error:
        return "refused" if "answered 400" in str(error) else str(error)
    expected = fleet.dispatcher.complete(fleet.plain(KIND).url, prompt)
    return "right" if got.tokens == expected.tokens else "WRONG TOKENS"


def test_broken_parameters_cost_a_computation_and_nothing_else(fleet: Fleet, source: random.Random) -> None:
    producer, consumer = _pair(fleet)
    fleet.plain(KIND)
    names = [name for name, _ in _broken(fleet.dispatcher.prefill(producer.url, [9], "x").kv_transfer_params)]

    def attempt(number: int, prompt: list[int]) -> str:
        valid = fleet.dispatcher.prefill(producer.url, prompt, uuid.uuid4().hex).kv_transfer_params
        [(_, params)] = [item for index, item in enumerate(_broken(valid)) if index == number]
        return _outcome(fleet, consumer, prompt, params)

    with ThreadPoolExecutor(8) as pool:
        prompts = [_prompt(source) for _ in names]
        outcomes = dict(zip(names, pool.map(attempt, range(len(names)), prompts), strict=True))
    bad = {name: outcome for name, outcome in outcomes.items() if outcome not in ("right", "refused")}
    assert not bad
    _assert_valid_parameters_are_used(fleet, producer, consumer, _prompt(source))


def test_parameters_that_are_no_object_are_refused_or_ignored(fleet: Fleet, source: random.Random) -> None:
    _, consumer = _pair(fleet)
    for params in ([], "x", 5, [[]], True):
        assert _outcome(fleet, consumer, _prompt(source), params) in ("right", "refused")


def test_a_host_that_never_answers_costs_the_claim_timeout(fleet: Fleet, source: random.Random) -> None:
    producer, consumer = _pair(fleet)
    prompt = _prompt(source)
    params = fleet.dispatcher.prefill(producer.url, prompt, uuid.uuid4().hex).kv_transfer_params
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        params.update(remote_host=host, remote_port=port)
        assert _outcome(fleet, consumer, prompt, params) == "right"
    _assert_valid_parameters_are_used(fleet, producer, consumer, _prompt(source))


def test_a_pair_that_cannot_work_computes_and_says_why_once(fleet: Fleet, source: random.Random) -> None:
    producer, consumer = fleet.instances(
        Key(KIND, "pp=2", "kv_producer", variant="recompute"), Key(KIND, "tp=1", "kv_consumer", variant="small-blocks")
    )
    for _ in range(3):
        prompt = _prompt(source)
        params = fleet.dispatcher.prefill(producer.url, prompt, uuid.uuid4().hex).kv_transfer_params
        assert _outcome(fleet, consumer, prompt, params) == "right"
    assert not [transfer for transfer in read_transfers(consumer.transfer_log) if transfer.used]
    warnings = [line for line in consumer.managed.log.read_text().splitlines() if "WARNING" in line]
    assert len([line for line in warnings if "blocks of 128 and 64 tokens cannot be paired" in line]) == 1
    assert httpx.get(f"{consumer.url}/health", trust_env=False).status_code == 200


@pytest.mark.parametrize(("prefill", "decode"), [("tight", "recompute"), ("recompute", "tight")])
def test_engines_that_do_not_share_a_secret_compute_for_themselves(
    fleet: Fleet, source: random.Random, prefill: str, decode: str
) -> None:
    producer, consumer = fleet.instances(
        Key(KIND, "pp=2", "kv_producer", variant=prefill), Key(KIND, "tp=1", "kv_consumer", variant=decode)
    )
    prompt = _prompt(source)
    earlier = len(read_transfers(consumer.transfer_log))
    params = fleet.dispatcher.prefill(producer.url, prompt, uuid.uuid4().hex).kv_transfer_params
    assert _outcome(fleet, consumer, prompt, params) == "right"
    assert len(read_transfers(consumer.transfer_log)) == earlier


def _assert_valid_parameters_are_used(fleet: Fleet, producer: Instance, consumer: Instance, prompt: list[int]) -> None:
    legs = fleet.dispatcher.both_legs(producer.url, consumer.url, prompt)
    moved = await_transfers(consumer.transfer_log, lambda t: legs.request_id in t.request, 1, 5.0)
    assert [transfer.result for transfer in moved.transfers] == ["held"]
