"""When requests are sent."""

import numpy as np


def offsets(count: int, rate: float | None, burstiness: float, seed: int) -> list[float]:
    """Seconds after the beginning at which each of `count` requests is sent.

    Intervals are of a gamma distribution with shape `burstiness`, so those of a Poisson process for 1; the last request
    is sent at ``count / rate`` exactly. Without a rate all are sent at once. Source: ``get_request`` in
    vllm/benchmarks/serve.py (0.32), which draws from numpy's global generator; this draws from one of its own.
    """
    if rate is None or not count:
        return [0.0] * count
    intervals = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count)
    sums = np.cumsum(intervals)
    return [float(at) for at in sums * (count / rate / sums[-1])]
