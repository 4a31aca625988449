"""For what only a poll can see: another process' log, metrics or end."""

import time
from collections.abc import Callable

import httpx

from .conftest import Instance

POLL_S = 0.1


def await_that(condition: Callable[[], bool], within_s: float, what: str) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {within_s:.0f} s"
        time.sleep(POLL_S)


def usage(instance: Instance) -> float:
    """Share of the KV cache's blocks that some request holds, summed over data parallel ranks."""
    text = httpx.get(f"{instance.url}/metrics", timeout=10, trust_env=False).text
    lines = [line for line in text.splitlines() if line.startswith("vllm:kv_cache_usage_perc")]
    assert lines
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def assert_nothing_is_held(*instances: Instance, within_s: float) -> None:
    for instance in instances:
        await_that(lambda instance=instance: usage(instance) == 0, within_s, f"{instance.spec.name} frees all blocks")
