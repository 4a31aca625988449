"""What ``kvferry bench serve`` and ``kvferry bench compare`` print."""

from collections.abc import Iterable, Sequence

from rich.table import Table

from kvferry.bench.serve.compare import Ratio
from kvferry.bench.serve.figures import METRICS, Row, idle, not_measured, rows, stall_rows
from kvferry.bench.serve.report import spread
from kvferry.bench.serve.result import Result
from kvferry.cli.console import out, page

STALL_GOAL = 1.25
"""What the project promises itself: how much a running request's p99 may grow while prompts are pulled."""


def show(result: Result, metrics: Sequence[str]) -> None:
    """Print what was measured, with `metrics` of requests."""
    console = page()
    for load in result.loads:
        here = [row for row in rows(result) if row.load == load.label]
        if not here:
            continue
        percentiles = list(here[0].latencies["ttft"])
        heads = [_head(metric, percentile) for metric in metrics for percentile in percentiles]
        goodput = ["good/s"] if any(row.goodput for row in here) else []
        table = _table(
            load.label, "contender", "answered", "req/s", *goodput, *heads, "CPU s/req", "moved", "same", "load"
        )
        for row in here:
            table.add_row(
                row.contender,
                f"{row.completed} of {row.completed + row.failed}",
                spread(row.throughput),
                *([spread(row.goodput) if row.goodput else ""] if goodput else []),
                *(spread(row.latencies[metric][percentile]) for metric in metrics for percentile in percentiles),
                f"{sum(seconds for name, seconds in row.cpu_s.items() if name != 'client'):.3f}",
                "" if row.moved is None else f"{row.moved:.0%}",
                "" if row.same is None else f"{row.same:.0%}",
                spread(row.load_average),
            )
        console.print(table)
        _show_parts(load.label, here)
    _show_idle(result)
    _show_stalls(result)
    for name, outcome, reason in not_measured(result):
        out.print(f"{name}: {outcome}: {reason}", markup=False)
    machine = result.machine
    console.print(
        f"{machine.cores} cores; load average {machine.load_before:.1f} before, {machine.load_after:.1f} after. "
        "Latencies in ms: median over rounds (least to greatest). Only ratios of one run say something about the "
        "software."
    )


def _show_parts(load: str, found: Sequence[Row]) -> None:
    if legs := sorted({leg for row in found for leg in row.legs}):
        table = _table(f"{load}: parts of a request, mean ms", "part", *(row.contender for row in found))
        for leg in legs:
            table.add_row(leg, *(f"{row.legs[leg]:.1f}" if leg in row.legs else "" for row in found))
        page().print(table)


def _show_idle(result: Result) -> None:
    if resting := idle(result):
        names = list(dict.fromkeys(name for of in resting.values() for name in of if name != "client"))
        table = _table("CPU seconds per idle second", "contender", *names)
        for contender, of in resting.items():
            table.add_row(contender, *(spread(of[name]) if name in of else "" for name in names))
        page().print(table)


def _show_stalls(result: Result) -> None:
    if found := stall_rows(result):
        table = _table(
            "a running request", "contender", "quiet p99", "busy p99", "ratio", "between", "one prompt", "prompts"
        )
        for row in found:
            colour = "green" if row.ratio.median <= STALL_GOAL else "yellow"
            table.add_row(
                row.contender,
                *(spread(each) for each in (row.quiet_ms, row.busy_ms)),
                f"[{colour}]{spread(row.ratio)}[/]",
                "" if row.between_ms is None else spread(row.between_ms),
                spread(row.pull_ms),
                f"{row.pulls}" + (f", {row.failed} failed" if row.failed else ""),
            )
        page().print(table)


def show_ratios(found: Iterable[Ratio]) -> None:
    """Print the second run in units of the first."""
    table = _table("second run / first run", "contender", "load", "figure", "first", "second", "ratio")
    for one in found:
        table.add_row(
            one.contender, one.load, one.figure, spread(one.first), spread(one.second), spread(one.ratio, "{:.2f}")
        )
    page().print(table)


def _head(metric: str, percentile: str) -> str:
    return f"{METRICS[metric][0]} {'med' if percentile == 'median' else f'p{percentile}'}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in ("contender", "part", "load", "figure") else "right")
    return table
