"""An engine with the connector that nobody disaggregates: it answers as without, and idles as without."""

import random
import time

import psutil
import pytest

from kvferry.cluster.metrics import PrefixHits

from .conftest import Fleet, Instance, Key

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

IDLE_S = 5.0
MOST_OF_A_CORE = 0.05


def test_ordinary_requests_are_answered_as_without_the_connector(fleet: Fleet) -> None:
    source = random.Random(99)
    [instance] = fleet.instances(Key("qwen2", "pp=2", "kv_both"))
    before = PrefixHits.read(instance.url)
    for tokens in (1, 128, 300):
        prompt = [source.randint(10, 370) for _ in range(tokens)]
        ours, plain = (fleet.dispatcher.complete(url, prompt) for url in (instance.url, fleet.plain("qwen2").url))
        assert ours.tokens == plain.tokens
        assert ours.kv_transfer_params is None
    assert PrefixHits.read(instance.url).since(before).external == 0


def _workers(instance: Instance) -> list[psutil.Process]:
    """The worker processes of an engine, which name themselves."""
    port = str(instance.spec.port)
    servers = [p for p in psutil.process_iter(["cmdline"]) if port in (p.info["cmdline"] or [])]
    family = {process.pid: process for server in servers for process in server.children(recursive=True)}
    return [process for process in family.values() if process.name().startswith("VLLM::Worker")]


def _cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def test_an_idle_worker_costs_under_five_percent_of_a_core(fleet: Fleet) -> None:
    """CPU time does not count what others use, but a busy machine makes each wake-up dearer: one quiet window of three
    is enough."""
    producer, consumer = fleet.pair("qwen2", "tp=1", "pp=2")
    fleet.dispatcher.both_legs(producer.url, consumer.url, [11] * 200)
    workers = _workers(producer) + _workers(consumer)
    assert len(workers) == 3
    shares: list[float] = []
    while len(shares) < 3:
        began, before = time.monotonic(), _cpu_seconds(workers)
        time.sleep(IDLE_S)  # being idle is what is measured
        shares.append((_cpu_seconds(workers) - before) / (time.monotonic() - began) / len(workers))
        if shares[-1] < MOST_OF_A_CORE:
            return
    pytest.fail(f"shares of a core used while idle: {shares}")
