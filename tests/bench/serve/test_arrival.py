"""Requests arrive as ``vllm bench serve`` would send them."""

import asyncio
from typing import Any

import numpy as np
import pytest

from kvferry.bench.serve.arrival import offsets


@pytest.mark.parametrize(("rate", "burstiness"), [(2.0, 1.0), (0.5, 0.3), (100.0, 4.0)])
def test_offsets_are_vllms_for_the_same_draws(monkeypatch: pytest.MonkeyPatch, rate: float, burstiness: float) -> None:
    serve = pytest.importorskip("vllm.benchmarks.serve")
    source, slept = np.random.default_rng(5), []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(serve.np.random, "gamma", lambda shape, scale: source.gamma(shape, scale))
    monkeypatch.setattr(serve.time, "time", lambda: 0.0)
    monkeypatch.setattr(serve.asyncio, "sleep", sleep)

    async def drain() -> None:
        requests: list[Any] = [object()] * 30
        async for _ in serve.get_request(requests, rate, burstiness):
            pass

    asyncio.run(drain())
    assert offsets(30, rate, burstiness, 5) == pytest.approx(slept)


def test_the_last_request_is_sent_when_the_rate_says() -> None:
    at = offsets(50, 4.0, 1.0, 1)
    assert at == sorted(at)
    assert at[-1] == pytest.approx(50 / 4.0)
    assert at[0] > 0


def test_without_a_rate_all_are_sent_at_once() -> None:
    assert offsets(3, None, 1.0, 1) == [0.0, 0.0, 0.0]
    assert offsets(0, 2.0, 1.0, 1) == []


def test_a_seed_gives_the_same_arrivals() -> None:
    assert offsets(20, 1.0, 1.0, 9) == offsets(20, 1.0, 1.0, 9)
    assert offsets(20, 1.0, 1.0, 9) != offsets(20, 1.0, 1.0, 10)


def test_intervals_of_a_poisson_process_vary_as_much_as_they_last() -> None:
    """The coefficient of variation of a gamma distribution is one over the root of its shape."""
    for burstiness in (0.25, 1.0, 4.0):
        intervals = np.diff(offsets(20_000, 1.0, burstiness, 3))
        assert intervals.std() / intervals.mean() == pytest.approx(burstiness**-0.5, rel=0.05)
