"""Two runs are held against each other only where they asked the same on the same machine."""

from typing import Any

import msgspec
import pytest

from kvferry.bench.serve.compare import beside, differences, ratios, stall_ratios
from kvferry.bench.serve.result import Load, Outcome, Result

from .results import LOAD, answer, load_run, result, turn, watched


def _run(*ttfts: float, **more: Any) -> Result:
    """A contender with one round for each."""
    return result(*(turn("kvferry", at, load_run(answer(ttft_s=ttft))) for at, ttft in enumerate(ttfts)), **more)


def test_a_ratio_is_of_medians_and_reaches_between_the_extremes() -> None:
    found = {one.figure: one.ratio for one in ratios(_run(0.1, 0.2, 0.4), _run(0.1, 0.1, 0.3))}
    ttft = found["TTFT median ms"]
    assert ttft.median == pytest.approx(0.1 / 0.2)
    assert ttft.least == pytest.approx(0.1 / 0.4)
    assert ttft.most == pytest.approx(0.3 / 0.1)


def test_a_run_is_as_good_as_itself() -> None:
    for one in ratios(_run(0.3), _run(0.3)):
        assert tuple(msgspec.structs.astuple(one.ratio)) == pytest.approx((1, 1, 1))


def test_only_what_both_have_measured_is_compared() -> None:
    other = result(turn("nixl", 0, load_run(answer())), turn("kvferry", 0, load_run(answer())))
    assert {one.contender for one in ratios(_run(0.1), other)} == {"kvferry"}
    broken_off = result(turn("kvferry", 0, load_run(answer(), complete=False)))
    assert list(ratios(_run(0.1), broken_off)) == []


@pytest.mark.parametrize(
    ("field", "inner", "name"),
    [
        ("model", {"config": "other"}, "model"),
        ("model", {"dtype": "bfloat16"}, "model"),
        ("prompts", {"seed": 8}, "prompts"),
        ("prompts", {"input_len": 11}, "prompts"),
        ("machine", {"cores": 4}, "cores"),
        ("machine", {"processor": "another"}, "processor"),
    ],
)
def test_what_differs_is_named(field: str, inner: dict[str, Any], name: str) -> None:
    one = _run(0.1)
    other = msgspec.structs.replace(one, **{field: msgspec.structs.replace(getattr(one, field), **inner)})
    [said] = differences(one, other)
    assert said.startswith(name)


def test_contenders_are_held_beside_one_of_them_under_each_load() -> None:
    slow, quick = load_run(answer(ttft_s=0.4)), load_run(answer(ttft_s=0.1))
    elsewhere = load_run(answer(), load=Load(2.0, None))
    run = result(turn("plain", 0, quick), turn("kvferry", 0, slow, elsewhere), turn("nixl", 0, elsewhere))
    found = list(beside(msgspec.structs.replace(run, loads=(LOAD, Load(2.0, None))), "plain"))
    assert {(one.contender, one.load) for one in found} == {("kvferry", LOAD.label)}
    assert found[0].ratio.median == pytest.approx(4)
    assert list(beside(run, "plain-dp")) == []


def test_another_load_is_a_difference_and_another_hour_is_none() -> None:
    assert differences(_run(0.1), _run(0.1, loads=(Load(2.0, None),)))
    assert differences(_run(0.1), _run(0.1, pinned=True))
    assert differences(_run(0.1), _run(0.2, 0.3, made="later", rounds=5, command="x")) == []


def test_a_stall_is_the_p99_while_prompts_come_of_that_in_quiet() -> None:
    one = result(turn("nixl", 0, stalls=[watched(0.02, 0.05), watched(0.02, 0.03)]))
    assert stall_ratios(one, "nixl") == pytest.approx([2.5, 1.5])
    [ratio] = ratios(one, result(turn("nixl", 0, stalls=[watched(0.02, 0.02)])))
    assert ratio.ratio.median == pytest.approx(1 / 2.0)


def test_a_stall_without_prompts_says_nothing() -> None:
    nothing = msgspec.structs.replace(watched(0.02, 0.05), pulls_s=())
    assert stall_ratios(result(turn("nixl", 0, stalls=[nothing])), "nixl") == []
    failed = turn("nixl", 0, stalls=[watched(0.02, 0.05)], outcome=Outcome.FAILED)
    assert stall_ratios(result(failed), "nixl") == []
