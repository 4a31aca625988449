"""Figures are those of ``vllm bench serve`` for the same samples."""

import random

import pytest

from kvferry.bench.serve.result import Answer
from kvferry.bench.serve.statistics import figures, parse_goodput, summary, tpot_s
from kvferry.errors import SpecError

from .results import answer

PERCENTILES = (50.0, 90.0, 99.0)
GOODPUT = {"ttft": 150.0, "tpot": 30.0, "e2el": 400.0}


def _answers(seed: int) -> list[Answer]:
    """With some that failed, and some of one token."""
    source = random.Random(seed)
    made = []
    for number in range(200):
        itl = tuple(source.expovariate(50) for _ in range(source.choice((0, 1, 5, 20))))
        failed = "it broke" if source.random() < 0.1 else ""
        start = source.random() * 3
        made.append(answer(number, source.expovariate(10), itl, start_s=start, error=failed))
    return made


@pytest.mark.parametrize("seed", range(3))
def test_every_figure_is_vllms(seed: int) -> None:
    serve = pytest.importorskip("vllm.benchmarks.serve")
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput

    answers = _answers(seed)
    outputs = [
        RequestFuncOutput(
            success=not one.error,
            latency=one.latency_s,
            output_tokens=one.output_tokens,
            ttft=one.ttft_s,
            itl=list(one.itl_s),
            prompt_len=one.prompt_tokens,
            start_time=one.start_s,
        )
        for one in answers
    ]
    theirs, _ = serve.calculate_metrics([], outputs, 5.0, None, list(PERCENTILES), GOODPUT)
    ours = summary(answers, 5.0, PERCENTILES, GOODPUT)
    assert (ours.completed, ours.failed) == (theirs.completed, theirs.failed)
    for name in ("request_throughput", "request_goodput", "output_throughput"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name))
    for metric in ("ttft", "tpot", "itl", "e2el"):
        mine = getattr(ours, f"{metric}_ms")
        for name in ("mean", "median", "std"):
            assert getattr(mine, name) == pytest.approx(getattr(theirs, f"{name}_{metric}_ms")), (metric, name)
        expected = {f"{number:g}": value for number, value in getattr(theirs, f"percentiles_{metric}_ms")}
        assert mine.percentiles == pytest.approx(expected)


def test_one_token_has_no_time_per_token_and_is_good() -> None:
    single = answer(itl_s=())
    assert tpot_s(single) is None
    assert summary([single], 1.0, (), {"tpot": 0.0}).request_goodput == 1.0


def test_all_bounds_have_to_hold() -> None:
    quick, late = answer(ttft_s=0.1), answer(ttft_s=0.3)
    assert summary([quick, late], 1.0, (), {"ttft": 200.0, "tpot": 25.0}).request_goodput == 1.0
    assert summary([quick, late], 1.0, (), {"ttft": 200.0, "tpot": 5.0}).request_goodput == 0.0


def test_without_bounds_nothing_is_said_about_goodness() -> None:
    assert summary([answer()], 1.0, (), {}).request_goodput is None


def test_without_answers_figures_are_zero() -> None:
    assert figures([], (99.0,)).percentiles == {"99": 0.0}
    assert summary([answer(error="no")], 1.0, (99.0,), {}).completed == 0


def test_bounds_are_read() -> None:
    assert parse_goodput(["ttft:500", "e2el:1e3"]) == {"ttft": 500.0, "e2el": 1000.0}


@pytest.mark.parametrize("text", ["ttft", "itl:5", "ttft:", "ttft:fast", "ttft:-1", "ttft:nan", "ttft:inf", ""])
def test_a_bound_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="--goodput"):
        parse_goodput([text])
