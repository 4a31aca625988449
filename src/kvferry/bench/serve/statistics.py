"""From answers to figures, as ``vllm bench serve`` defines them (``calculate_metrics``, vllm/benchmarks/serve.py).

TTFT, ITL and E2EL are measured by the client as each ``Answer`` says. TPOT is ``(E2EL - TTFT) / (output tokens - 1)``
of requests with more than one output token. A request is good if all bounds given hold; one with a single token has a
TPOT of 0 then. Percentiles are numpy's, interpolated linearly. Requests that failed count in nothing but ``failed``.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from kvferry.bench.serve.result import Answer, Figures, Summary
from kvferry.errors import SpecError

GOODPUT = ("ttft", "tpot", "e2el")


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """Bounds in milliseconds from texts such as ``ttft:500``.

    Raises:
        SpecError: one is not of that form, names something else, or is negative.
    """
    bounds: dict[str, float] = {}
    for pair in pairs:
        name, _, text = pair.partition(":")
        if name not in GOODPUT:
            raise SpecError(f"--goodput {pair} is not KEY:MILLISECONDS with a key of {', '.join(GOODPUT)}")
        try:
            bounds[name] = float(text)
        except ValueError:
            raise SpecError(f"--goodput {pair}: {text!r} is not a number of milliseconds") from None
        if not bounds[name] >= 0 or bounds[name] == float("inf"):
            raise SpecError(f"--goodput {pair} is not a bound that can be held")
    return bounds


def tpot_s(answer: Answer) -> float | None:
    """Seconds per output token after the first; None where there is no second."""
    if answer.output_tokens < 2:
        return None
    return (answer.latency_s - answer.ttft_s) / (answer.output_tokens - 1)


def summary(
    answers: Sequence[Answer], duration_s: float, percentiles: Sequence[float], goodput_ms: Mapping[str, float]
) -> Summary:
    """What the answers of one load say; `duration_s` is from its beginning to the end of the last answer."""
    answered = [answer for answer in answers if not answer.error]
    tpots = [tpot for answer in answered if (tpot := tpot_s(answer)) is not None]
    good = sum(_good(answer, goodput_ms) for answer in answered)
    duration_s = max(duration_s, 1e-9)
    return Summary(
        completed=len(answered),
        failed=len(answers) - len(answered),
        request_throughput=len(answered) / duration_s,
        request_goodput=good / duration_s if goodput_ms else None,
        output_throughput=sum(answer.output_tokens for answer in answered) / duration_s,
        ttft_ms=figures([answer.ttft_s for answer in answered], percentiles),
        tpot_ms=figures(tpots, percentiles),
        itl_ms=figures([itl for answer in answered for itl in answer.itl_s], percentiles),
        e2el_ms=figures([answer.latency_s for answer in answered], percentiles),
    )


def figures(seconds: Sequence[float], percentiles: Sequence[float]) -> Figures:
    """In milliseconds; zeros where there are none, as vLLM has it."""
    values = np.asarray(seconds or [0.0]) * 1e3
    chosen = {f"{percentile:g}": float(np.percentile(values, percentile)) for percentile in percentiles}
    return Figures(float(values.mean()), float(np.median(values)), float(values.std()), chosen)


def percentile_ms(seconds: Sequence[float], percentile: float) -> float:
    """Raises ``ValueError`` where there are none."""
    if not seconds:
        raise ValueError("nothing was measured")
    return float(np.percentile(seconds, percentile)) * 1e3


def _good(answer: Answer, bounds_ms: Mapping[str, float]) -> bool:
    seconds = {"ttft": answer.ttft_s, "tpot": tpot_s(answer) or 0.0, "e2el": answer.latency_s}
    return all(seconds[name] * 1e3 <= bound for name, bound in bounds_ms.items())
