"""What processes spend, and what they say of themselves."""

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from kvferry.bench.serve.result import Mean
from kvferry.cluster.supervisor import Supervisor

TIMEOUT_S = 10.0
CLIENT = "client"
LEGS = {
    "queue": "vllm:request_queue_time_seconds",
    "prefill": "vllm:request_prefill_time_seconds",
    "first token": "vllm:time_to_first_token_seconds",
    "transfer": "vllm:nixl_xfer_time_seconds",
    "post": "vllm:nixl_post_time_seconds",
    "prefill leg": "kvferry_gateway_prefill_seconds",
    "first byte": "kvferry_gateway_first_byte_seconds",
}
"""Histograms that are parts of a request, by what they are called in a result, after whose they are."""
PHASES = "kvferry:phase_seconds"
MOVED = "vllm:external_prefix_cache_hits"


class Said(NamedTuple):
    """What ``/metrics`` of ``processes`` said at a moment: sums and counts of ``LEGS``, and tokens moved."""

    legs: Mapping[str, tuple[float, float]]
    moved: float
    processes: int = 1


def read(urls: Mapping[str, str]) -> Said:
    """Ask each process, by name; one that does not answer has said nothing."""
    legs: dict[str, tuple[float, float]] = {}
    moved, processes = 0.0, 0
    with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client:
        for name, url in urls.items():
            with contextlib.suppress(httpx.HTTPError, ValueError):
                one = parse(client.get(f"{url}/metrics").raise_for_status().text)
                legs.update({f"{name}: {leg}": value for leg, value in one.legs.items()})
                moved, processes = moved + one.moved, processes + 1
    return Said(legs, moved, processes)


def parse(text: str) -> Said:
    """Read what ``/metrics`` answers; ranks of an engine are added up.

    Raises:
        ValueError: it is no such text.
    """
    called = {name: leg for leg, name in LEGS.items()}
    sums: dict[str, list[float]] = {}
    moved = 0.0
    for family in text_string_to_metric_families(text):
        if family.name == MOVED:
            moved += sum(sample.value for sample in family.samples if sample.name == f"{MOVED}_total")
        if family.type != "histogram" or (family.name not in called and family.name != PHASES):
            continue
        for sample in family.samples:
            place = {"_sum": 0, "_count": 1}.get(sample.name.removeprefix(family.name))
            if place is not None:
                leg = called.get(family.name) or sample.labels["phase"]
                sums.setdefault(leg, [0.0, 0.0])[place] += sample.value
    return Said({leg: (total, count) for leg, (total, count) in sums.items()}, moved)


def between(before: Said, after: Said) -> tuple[dict[str, Mean], int | None]:
    """Means of what was observed between two moments, and tokens moved; None where a process has died meanwhile."""
    legs = {}
    for leg, (total, count) in after.legs.items():
        total_before, count_before = before.legs.get(leg, (0.0, 0.0))
        if count > count_before:
            legs[leg] = Mean(int(count - count_before), (total - total_before) / (count - count_before))
    return legs, int(after.moved - before.moved) if after.processes >= before.processes else None


def cpu_seconds(supervisor: Supervisor) -> dict[str, float]:
    """Processor time of each process so far: ``prefill``, ``prefill EngineCore``, ..., and of this one."""
    spent: dict[str, float] = {CLIENT: _spent(psutil.Process(os.getpid()))}
    for name, tree in supervisor.processes().items():
        for process in tree:
            label = f"{name} {title}" if (title := _title(process)) else name
            spent[label] = spent.get(label, 0.0) + _spent(process)
    return spent


def _title(process: psutil.Process) -> str:
    """What vLLM calls a process of an engine, such as ``EngineCore``; empty for others."""
    try:
        first = (process.cmdline() or [""])[0]
    except psutil.Error:
        return ""
    return first.removeprefix("VLLM::").split()[0] if first.startswith("VLLM::") else ""


def _spent(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
        return float(times.user + times.system)
    except psutil.Error:
        return 0.0


def grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What each has spent between; a process that was not there before began with nothing."""
    return {name: max(0.0, spent - before.get(name, 0.0)) for name, spent in after.items()}


def by_instance(cpu: Mapping[str, float]) -> dict[str, float]:
    """Processes of one engine added up."""
    sums: dict[str, float] = {}
    for name, seconds in cpu.items():
        instance = name.partition(" ")[0]
        sums[instance] = sums.get(instance, 0.0) + seconds
    return sums


def total(values: Iterable[Mapping[str, float]], without: Sequence[str] = (CLIENT,)) -> float:
    """Over all but the program that asks."""
    return sum(seconds for each in values for name, seconds in each.items() if name not in without)
