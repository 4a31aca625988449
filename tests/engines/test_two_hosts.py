"""Prefill on one host and decode on another: nothing is shared but a network."""

import json
import os
import random
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from kvferry.cluster.commands import cpu_build_installed, engine_command, engine_environment
from kvferry.cluster.launch import logging_transfers, start_gateway
from kvferry.cluster.metrics import total
from kvferry.cluster.ports import free_ports
from kvferry.cluster.spec import InstanceSpec, Layout
from kvferry.cluster.supervisor import Supervisor
from kvferry.cluster.tiny import tiny
from kvferry.cluster.transfers import await_transfers, read_transfers

from .conftest import CACHE_BYTES, DEADLINES, START_DEADLINE_S, Fleet, Instance
from .hosts import CARD, Host, hosts, why_none
from .waiting import assert_nothing_is_held, await_that

pytestmark = [pytest.mark.engines, pytest.mark.heavy, pytest.mark.timeout(900)]

KIND, PORT = "qwen2", 8000
SECRET = "known on both hosts"


@dataclass(frozen=True)
class There:
    """Two hosts, and the engine on each."""

    prefill_host: Host
    decode_host: Host
    producer: Instance
    consumer: Instance


@pytest.fixture(scope="module")
def two() -> Iterator[list[Host]]:
    if reason := why_none():
        pytest.skip(reason)
    with hosts(2) as made:
        yield made


@pytest.fixture(scope="module")
def there(two: list[Host], tmp_path_factory: pytest.TempPathFactory) -> Iterator[There]:
    directory = tmp_path_factory.mktemp("hosts")
    log = directory / "transfers.jsonl"
    producer = _spec("prefill", "pp=2", "kv_producer", two[0])
    consumer = logging_transfers(_spec("decode", "tp=2", "kv_consumer", two[1]), log)
    with Supervisor(directory) as supervisor:
        for spec, host in ((producer, two[0]), (consumer, two[1])):
            command = host.running(engine_command(spec, cpu_build_installed()))
            supervisor.start(spec.name, command, engine_environment(spec, os.environ, cpu_build_installed()))
        supervisor.wait_ready({spec.name: f"{spec.url}/health" for spec in (producer, consumer)}, START_DEADLINE_S)
        yield There(two[0], two[1], Instance(producer, log, supervisor), Instance(consumer, log, supervisor))


def _spec(name: str, layout: str, role: str, host: Host) -> InstanceSpec:
    """Of an engine that is told nothing but its host's address; what UCX takes to the other host is UCX's to find."""
    return InstanceSpec(
        name,
        tiny(KIND),
        Layout.parse(layout),
        PORT,
        role,
        kv_cache_bytes=CACHE_BYTES,
        kv_load_failure_policy="recompute",
        connector_config=dict(DEADLINES),
        environment={"VLLM_HOST_IP": host.address, "GLOO_SOCKET_IFNAME": CARD, "KVFERRY_SECRET": SECRET},
        host=host.address,
    )


def _prompt(seed: str) -> list[int]:
    source = random.Random(seed)
    return [source.randint(10, 370) for _ in range(300)]


def _legs(fleet: Fleet, there: There, prompt: list[int], cut: bool = False) -> tuple[int, ...]:
    """The tokens of both legs; with ``cut`` the hosts lose each other before the second."""
    name = uuid.uuid4().hex
    offered = fleet.dispatcher.prefill(there.producer.url, prompt, name).kv_transfer_params
    if not cut:
        return fleet.dispatcher.decode(there.consumer.url, prompt, name, offered).tokens
    with there.decode_host.cut_off_from(there.prefill_host):
        return fleet.dispatcher.decode(there.consumer.url, prompt, name, offered).tokens


def test_doctor_measures_the_link_between_them(two: list[Host], tmp_path: Path) -> None:
    environment = {**os.environ, "KVFERRY_SECRET": SECRET}
    doctor = [sys.executable, "-m", "kvferry", "doctor"]
    serving = [*doctor, "serve", "--host", two[0].address, "--port", str(PORT + 1)]
    with Supervisor(tmp_path) as supervisor:
        served = supervisor.start("serve", two[0].running(serving), environment)
        await_that(lambda: "serving on" in served.log.read_text(), 60.0, "doctor serves")
        asking = two[1].running([*doctor, f"{two[0].address}:{PORT + 1}", "--megabytes", "8", "--json"])
        here = {**environment, "VLLM_HOST_IP": two[1].address}
        done = subprocess.run(asking, env=here, capture_output=True, timeout=120, check=False)
    said = json.loads(done.stdout)
    assert done.returncode == 0, said
    assert said["link"]["to_here"]["gigabytes_per_s"] > 0
    assert said["link"]["to_there"]["gigabytes_per_s"] > 0
    assert f"tcp/{CARD}" in done.stdout.decode()


def test_the_tokens_are_those_of_a_plain_engine(fleet: Fleet, there: There) -> None:
    prompt = _prompt("equal")
    expected = fleet.dispatcher.complete(fleet.plain(KIND).url, prompt).tokens
    assert _legs(fleet, there, prompt) == expected
    moved = await_transfers(there.consumer.transfer_log, lambda one: one.used, 2, deadline_s=5.0).transfers
    assert {transfer.consumer.tp for transfer in moved} == {0, 1}
    assert all({read.producer.pp for read in transfer.reads} == {0, 1} for transfer in moved)


def test_the_gateway_on_a_third_host_answers(fleet: Fleet, there: There, tmp_path: Path) -> None:
    prompt = _prompt("gateway")
    body = {"model": "model", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    expected = httpx.post(f"{fleet.plain(KIND).url}/v1/completions", json=body, timeout=60, trust_env=False)
    earlier = len(read_transfers(there.consumer.transfer_log))
    with Supervisor(tmp_path) as supervisor:
        (port,) = free_ports(1)
        url = start_gateway(supervisor, [there.producer.spec], [there.consumer.spec], port, lambda *_: None)
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)
    assert answer.json()["choices"] == expected.json()["choices"]
    assert (
        len(await_transfers(there.consumer.transfer_log, lambda one: one.used, earlier + 2, deadline_s=5.0).transfers)
        == earlier + 2
    )


def test_doctor_finds_the_pair_connected(there: There) -> None:
    command = [sys.executable, "-m", "kvferry", "doctor", "--json"]
    urls = ["--prefill", there.producer.url, "--decode", there.consumer.url]
    done = subprocess.run([*command, *urls], capture_output=True, timeout=60, check=False)
    findings = json.loads(done.stdout)
    assert done.returncode == 0, findings
    assert "connected" in done.stdout.decode()


def test_a_host_that_is_cut_off_costs_a_prompts_time_and_no_token(fleet: Fleet, there: There) -> None:
    """Packets are lost without a word: only deadlines tell."""
    plain = fleet.plain(KIND).url
    lost, after = _prompt("lost"), _prompt("after")
    before = _recomputed(there)
    assert _legs(fleet, there, lost, cut=True) == fleet.dispatcher.complete(plain, lost).tokens
    assert _recomputed(there) == before + 1
    used = len([one for one in read_transfers(there.consumer.transfer_log) if one.used])
    assert _legs(fleet, there, after) == fleet.dispatcher.complete(plain, after).tokens
    await_transfers(there.consumer.transfer_log, lambda one: one.used, used + 2, deadline_s=5.0)
    assert_nothing_is_held(there.producer, there.consumer, within_s=2 * DEADLINES["kv_lease_duration"])


def _recomputed(there: There) -> int:
    return total(httpx.get(f"{there.consumer.url}/metrics", trust_env=False).text, "kvferry:recomputed")
