"""What tables, plots and the report show of a result: medians over rounds, with the least and the greatest."""

from collections.abc import Callable, Sequence

import msgspec

from kvferry.bench.serve import meters
from kvferry.bench.serve.compare import measured, runs, stall_ratios
from kvferry.bench.serve.result import Figures, Load, LoadRun, Outcome, Result, Summary, Watched
from kvferry.bench.serve.statistics import percentile_ms
from kvferry.bench.spread import Spread

METRICS = {
    "ttft": ("TTFT", "time to first token"),
    "tpot": ("TPOT", "time per output token after the first"),
    "itl": ("ITL", "time between two tokens"),
    "e2el": ("E2EL", "time to the last token"),
}


class Row(msgspec.Struct, frozen=True):
    """A contender under one load.

    Attributes:
        latencies: by metric and ``median`` or a percentile's number, in milliseconds.
        cpu_s: processor seconds per request, of each engine, router, server.
        moved: of all prompt tokens, those that came through the connector; None without one, and where nobody knows.
        same: of the answers, those whose text is that of the plain engine; None where there is none to compare with.
        legs: mean milliseconds, over all rounds.
        load_average: of the machine at the end of each round, with what others ran on it.
    """

    contender: str
    load: str
    rounds: int
    completed: int
    failed: int
    throughput: Spread
    goodput: Spread | None
    latencies: dict[str, dict[str, Spread]]
    cpu_s: dict[str, float]
    moved: float | None
    same: float | None
    legs: dict[str, float]
    load_average: Spread


class StallRow(msgspec.Struct, frozen=True):
    """A contender's running request: p99 in milliseconds, medians over the times it was watched.

    Attributes:
        between_ms: while prompts came, but for the steps that computed a long prompt's token; None in old files.
    """

    contender: str
    watched: int
    quiet_ms: Spread
    busy_ms: Spread
    between_ms: Spread | None
    ratio: Spread
    pull_ms: Spread
    pulls: int
    failed: int


def rows(result: Result) -> list[Row]:
    """One for each load and contender that was measured under it."""
    found = []
    for load in result.loads:
        reference = _reference(result, load)
        for contender in measured(result):
            if some := runs(result, contender, load):
                found.append(_row(contender, load, some, reference))
    return found


def _row(contender: str, load: Load, some: Sequence[LoadRun], reference: Sequence[dict[int, str]]) -> Row:
    summaries = [run.summary for run in some]
    completed = sum(one.completed for one in summaries)
    answers = [answer for run in some for answer in run.answers if not answer.error]
    moved = None
    if all(run.moved_tokens is not None for run in some):
        moved = sum(run.moved_tokens or 0 for run in some) / sum(answer.prompt_tokens for answer in answers)
    good = [one.request_goodput for one in summaries if one.request_goodput is not None]
    return Row(
        contender=contender,
        load=load.label,
        rounds=len(some),
        completed=completed,
        failed=sum(one.failed for one in summaries),
        throughput=Spread.of(one.request_throughput for one in summaries),
        goodput=Spread.of(good) if good else None,
        latencies={metric: _latencies(summaries, metric) for metric in METRICS},
        cpu_s={name: seconds / completed for name, seconds in _summed(some).items()},
        moved=moved,
        same=_same(some, reference),
        legs=_legs(some),
        load_average=Spread.of(run.load_average for run in some),
    )


def _latencies(summaries: Sequence[Summary], metric: str) -> dict[str, Spread]:
    figures: list[Figures] = [getattr(one, f"{metric}_ms") for one in summaries]
    named = {"median": Spread.of(one.median for one in figures)}
    return named | {
        percentile: Spread.of(one.percentiles[percentile] for one in figures) for percentile in figures[0].percentiles
    }


def _summed(some: Sequence[LoadRun]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for run in some:
        for name, seconds in meters.by_instance(run.cpu_s).items():
            sums[name] = sums.get(name, 0.0) + seconds
    return sums


def _legs(some: Sequence[LoadRun]) -> dict[str, float]:
    counts: dict[str, int] = {}
    sums: dict[str, float] = {}
    for run in some:
        for leg, mean in run.legs.items():
            counts[leg] = counts.get(leg, 0) + mean.count
            sums[leg] = sums.get(leg, 0.0) + mean.count * mean.seconds
    return {leg: sums[leg] / count * 1e3 for leg, count in counts.items()}


def _reference(result: Result, load: Load) -> list[dict[int, str]]:
    """Of each round, the texts of one plain engine by the request's place."""
    return [_texts(run) for run in runs(result, "plain", load)]


def _texts(run: LoadRun) -> dict[int, str]:
    return {answer.number: answer.digest for answer in run.answers if not answer.error}


def _same(some: Sequence[LoadRun], reference: Sequence[dict[int, str]]) -> float | None:
    equal = [
        text == expected[number]
        for run, expected in zip(some, reference, strict=False)
        for number, text in _texts(run).items()
        if number in expected
    ]
    return sum(equal) / len(equal) if equal else None


def idle(result: Result) -> dict[str, dict[str, Spread]]:
    """Of each contender and process, processor seconds per idle second."""
    found: dict[str, dict[str, Spread]] = {}
    for contender in dict.fromkeys(turn.contender for turn in result.turns):
        turns = [turn.idle_cpu for turn in result.turns if turn.contender == contender and turn.idle_cpu]
        names = dict.fromkeys(name for one in turns for name in meters.by_instance(one))
        if turns:
            found[contender] = {
                name: Spread.of(meters.by_instance(one).get(name, 0.0) for one in turns) for name in names
            }
    return found


def stall_rows(result: Result) -> list[StallRow]:
    """One for each contender whose running request was watched."""
    found = []
    for contender in measured(result):
        if ratios := stall_ratios(result, contender):
            found.append(_stall_row(contender, _watched(result, contender), ratios))
    return found


def _watched(result: Result, contender: str) -> list[Watched]:
    turns = [turn for turn in result.turns if turn.contender == contender]
    return [one for turn in turns for one in turn.stalls if one.quiet_itl_s and one.busy_itl_s and one.pulls_s]


def _stall_row(contender: str, watched: Sequence[Watched], ratios: Sequence[float]) -> StallRow:
    def p99(of: Callable[[Watched], Sequence[float]]) -> Spread:
        return Spread.of(percentile_ms(of(one), 99) for one in watched)

    pulls = [seconds for one in watched for seconds in one.pulls_s]
    return StallRow(
        contender=contender,
        watched=len(watched),
        quiet_ms=p99(lambda one: one.quiet_itl_s),
        busy_ms=p99(lambda one: one.busy_itl_s),
        between_ms=p99(lambda one: one.between_itl_s) if all(one.between_itl_s for one in watched) else None,
        ratio=Spread.of(ratios),
        pull_ms=Spread.of(seconds * 1e3 for seconds in pulls),
        pulls=len(pulls),
        failed=sum(one.failed for one in watched),
    )


def not_measured(result: Result) -> list[tuple[str, str, str]]:
    """Contender, outcome and the reason's first line, of each turn that did not end well."""
    return [
        (turn.contender, str(turn.outcome), turn.reason.partition("\n")[0])
        for turn in result.turns
        if turn.outcome is not Outcome.MEASURED
    ]
