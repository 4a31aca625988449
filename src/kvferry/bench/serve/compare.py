"""One saved run beside another."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvferry.bench.serve.result import SCHEMA, Load, LoadRun, Outcome, Result
from kvferry.bench.serve.statistics import percentile_ms
from kvferry.bench.spread import Spread

FIGURES: dict[str, Callable[[LoadRun], float]] = {
    "TTFT median ms": lambda run: run.summary.ttft_ms.median,
    "TPOT median ms": lambda run: run.summary.tpot_ms.median,
    "ITL median ms": lambda run: run.summary.itl_ms.median,
    "E2EL median ms": lambda run: run.summary.e2el_ms.median,
    "requests/s": lambda run: run.summary.request_throughput,
}
REFERENCES = ("plain", "plain-dp")
"""One engine that does everything, and two: what prefill and decode apart has to be held against."""
STALL_LOAD = "stall: ITL p99, busy of quiet"


class Ratio(NamedTuple):
    """A figure of the second run, or contender, in units of the first's: of the medians over rounds, and between their
    extremes.
    """

    contender: str
    load: str
    figure: str
    first: Spread
    second: Spread

    @property
    def ratio(self) -> Spread:
        def of(one: float, other: float) -> float:
            return one / other if other else float("inf")

        return Spread(
            of(self.second.median, self.first.median),
            of(self.second.least, self.first.most),
            of(self.second.most, self.first.least),
        )


def differences(first: Result, second: Result) -> list[str]:
    """Why two runs cannot be held against each other; empty where they can."""
    asked = {
        "schema": lambda run: run.schema,
        "model": lambda run: (run.model.config, run.model.dtype),
        "prefill layout": lambda run: run.prefill,
        "decode layout": lambda run: run.decode,
        "prompts": lambda run: run.prompts,
        "loads": lambda run: run.loads,
        "stall": lambda run: run.stall,
        "cores": lambda run: run.machine.cores,
        "engines with cores of their own": lambda run: run.pinned,
        "processor": lambda run: run.machine.processor,
        "accelerators": lambda run: run.machine.accelerators,
    }
    return [
        f"{name}: {_short(of(first))} and {_short(of(second))}" for name, of in asked.items() if of(first) != of(second)
    ]


def _short(value: object) -> str:
    return str(value) if len(str(value)) < 200 else f"{str(value)[:200]}..."


def known_schema(result: Result) -> bool:
    """Whether this version reads that file rightly."""
    return result.schema == SCHEMA


def ratios(first: Result, second: Result) -> Iterator[Ratio]:
    """For every contender and load that both have measured, figures in the order of ``FIGURES``."""
    for contender in measured(first):
        for load in first.loads:
            ones, others = runs(first, contender, load), runs(second, contender, load)
            if ones and others:
                for figure, of in FIGURES.items():
                    yield Ratio(contender, load.label, figure, Spread.of(map(of, ones)), Spread.of(map(of, others)))
        stalled = stall_ratios(first, contender), stall_ratios(second, contender)
        if all(stalled):
            yield Ratio(contender, "stall", STALL_LOAD, Spread.of(stalled[0]), Spread.of(stalled[1]))


def beside(result: Result, reference: str) -> Iterator[Ratio]:
    """All other contenders in units of one, under every load that both have been asked under."""
    for load in result.loads:
        ones = runs(result, reference, load)
        for contender in measured(result):
            others = runs(result, contender, load)
            if ones and others and contender != reference:
                for figure, of in FIGURES.items():
                    yield Ratio(contender, load.label, figure, Spread.of(map(of, ones)), Spread.of(map(of, others)))


def measured(result: Result) -> list[str]:
    """Contenders of which there is something, in the order of the run."""
    return list(dict.fromkeys(turn.contender for turn in result.turns if turn.loads or turn.stalls))


def runs(result: Result, contender: str, load: Load) -> list[LoadRun]:
    """All rounds of a contender under one load that were not broken off and have an answer."""
    turns = [turn for turn in result.turns if turn.contender == contender]
    found = [run for turn in turns for run in turn.loads if run.load == load]
    return [run for run in found if run.complete and run.summary.completed]


def stall_ratios(result: Result, contender: str, percentile: float = 99) -> list[float]:
    """Of each watched turn: the percentile while prompts came, of that while it was quiet."""
    turns = [turn for turn in result.turns if turn.contender == contender and turn.outcome is not Outcome.FAILED]
    watched = [one for turn in turns for one in turn.stalls if one.quiet_itl_s and one.busy_itl_s and one.pulls_s]
    return [percentile_ms(one.busy_itl_s, percentile) / percentile_ms(one.quiet_itl_s, percentile) for one in watched]
