"""The report is one page that says everything and fetches nothing."""

import re

import msgspec
import pytest

from kvferry.bench.serve.figures import idle, not_measured, rows, stall_rows
from kvferry.bench.serve.plots import plots
from kvferry.bench.serve.report import report
from kvferry.bench.serve.result import Outcome, Result

from .results import LOAD, answer, load_run, result, turn, watched

METRICS = ("ttft", "itl")


@pytest.fixture
def whole() -> Result:
    """Two rounds, and one contender that did not run."""
    both = [load_run(answer(0), answer(1, ttft_s=0.3), moved=15), load_run(answer(0), answer(1), moved=20)]
    return result(
        turn("plain", 0, load_run(answer(0), answer(1))),
        turn("kvferry", 0, both[0], stalls=[watched(0.02, 0.03)]),
        turn("nixl", 0, outcome=Outcome.NOT_INSTALLED, reason="nixl is <not> installed", idle_cpu={}),
        turn("plain", 1, load_run(answer(0), answer(1, digest="another"))),
        turn("kvferry", 1, both[1], stalls=[watched(0.02, 0.04)]),
    )


def test_rows_add_up_rounds(whole: Result) -> None:
    [plain, kvferry] = rows(whole)
    assert (plain.contender, kvferry.contender, kvferry.rounds, kvferry.completed) == ("plain", "kvferry", 2, 4)
    assert plain.moved is None
    assert kvferry.moved == pytest.approx(35 / 40)
    assert kvferry.cpu_s == pytest.approx({"client": 1.0 / 4, "decode": 6.0 / 4})
    assert kvferry.legs == pytest.approx({"decode: queue": 2.0})
    assert kvferry.latencies["ttft"]["median"].most == pytest.approx(200)
    assert kvferry.latencies["ttft"]["median"].least == pytest.approx(100)


def test_texts_are_held_against_those_of_plain_prompt_by_prompt(whole: Result) -> None:
    [plain, kvferry] = rows(whole)
    assert plain.same == 1.0
    assert kvferry.same == 3 / 4


def test_a_prompt_that_plain_failed_is_held_against_nothing() -> None:
    plain = turn("plain", 0, load_run(answer(0), answer(1, error="it broke")))
    [_, row] = rows(result(plain, turn("kvferry", 0, load_run(answer(0), answer(1)))))
    assert row.same == 1.0


def test_without_a_plain_engine_there_is_nothing_to_hold_texts_against() -> None:
    [row] = rows(result(turn("kvferry", 0, load_run(answer()))))
    assert row.same is None


def test_what_was_idle_is_added_up_by_engine(whole: Result) -> None:
    assert idle(whole)["kvferry"]["decode"].median == pytest.approx(0.05)
    assert "nixl" not in idle(whole)


def test_a_stall_is_a_row(whole: Result) -> None:
    [row] = stall_rows(whole)
    assert (row.contender, row.watched, row.pulls) == ("kvferry", 2, 4)
    assert row.ratio.median == pytest.approx(1.75)


def test_the_page_has_every_contender_and_every_reason(whole: Result) -> None:
    page = report(whole, {"A picture": "<svg></svg>"}, METRICS)
    for words in ("plain", "kvferry", "nixl is &lt;not&gt; installed", "a &lt;note&gt;", LOAD.label, "TTFT p99 ms"):
        assert words in page, words
    for words in ("load average 0.5 before", "sched_yield", "seed 7", "A picture", "ratio"):
        assert words in page, words
    assert "TPOT p99" not in page
    assert "<not>" not in page
    assert not_measured(whole) == [("nixl", "not installed", "nixl is <not> installed")]


def test_a_page_says_when_it_is_not_all(whole: Result) -> None:
    assert "broken off" not in report(whole, {}, METRICS)
    assert "broken off" in report(msgspec.structs.replace(whole, complete=False), {}, METRICS)


def test_the_page_fetches_nothing(whole: Result) -> None:
    """Pictures are in it; addresses are only names of XML."""
    pytest.importorskip("matplotlib")
    drawn = plots(whole)
    page = report(whole, drawn, METRICS)
    assert page.count("<svg") == len(drawn) == 6
    assert not re.search(r"<(script|link|img|iframe)|@import|url\((?!#)|src=", page)
    addresses = set(re.findall(r'(?:href|src)="(?!#)([^"]*)"', page))
    assert addresses == set()


def test_the_same_result_gives_the_same_page(whole: Result) -> None:
    pytest.importorskip("matplotlib")
    assert plots(whole) == plots(whole)


def test_a_result_that_was_broken_off_at_once_can_be_shown() -> None:
    pytest.importorskip("matplotlib")
    empty = result(turn("kvferry", 0, outcome=Outcome.INTERRUPTED, reason="interrupted", idle_cpu={}))
    assert plots(empty) == {}
    assert "interrupted" in report(empty, {}, METRICS)


def test_a_result_survives_its_file(whole: Result) -> None:
    assert msgspec.json.decode(msgspec.json.encode(whole), type=Result) == whole
