"""What a benchmark has found, as tables and as a plot."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from kvferry.bench.spread import Spread
from kvferry.bench.transfer.acks import Acks
from kvferry.bench.transfer.contact import FirstContact
from kvferry.bench.transfer.growth import Point
from kvferry.bench.transfer.report import Measured, Report, Row
from kvferry.cli.console import page
from kvferry.cli.figures import drawing
from kvferry.cli.units import amount

T = TypeVar("T")
K = TypeVar("K")

ENOUGH_EQUAL, ENOUGH_UNEQUAL = 0.90, 0.75
"""Of the ceiling, with equal and with unequal layouts: what the project promises itself."""


def show(measured: Measured) -> None:
    """Print what is there."""
    console = page()
    if measured.pairs is not None:
        _show_pairs(console, measured.pairs)
    if measured.contact is not None:
        console.print(_contact(measured.contact))
    if measured.acks is not None:
        console.print(_acks(measured.acks))
    if measured.growth is not None:
        console.print(_growth(measured.growth))
    machine = measured.machine
    console.print(
        f"{machine.cores} cores; load average {machine.load_before:.1f} before, {machine.load_after:.1f} after. "
        "Only ratios of one run say something about the software."
    )


def _show_pairs(console: Console, report: Report) -> None:
    console.print(_rates(report))
    console.print(_costs(report.rows))
    console.print(
        f"Transport {report.transport}, {report.blocks} blocks of {report.block_tokens} tokens, "
        f"{report.bytes_per_token:,} bytes per token. Medians, and (least to greatest). 1 GB is 1e9 bytes. "
        "Ceiling: the same processes read as many bytes in one piece per producer worker. Ratio: rate of ceiling; "
        "by CPU: processor time for the ceiling of that for the load, in the readers, whatever else the machine does. "
        "Ranges: by CPU as well, but of the load's own ranges read by NIXL alone."
    )


def _rates(report: Report) -> Table:
    table = _table("rates", "pair", "tokens", "bytes", "descr.", "GB/s", "ceiling", "copy", "ratio", "by CPU", "ranges")
    for row in report.rows:
        enough = row.ratio.median >= (ENOUGH_EQUAL if row.equal else ENOUGH_UNEQUAL)
        table.add_row(
            *_names(row),
            amount(row.bytes),
            f"{row.descriptors:,}",
            *(_spread(value) for value in (row.rate, row.ceiling, row.copy)),
            f"[{'green' if enough else 'yellow'}]{_spread(row.ratio)}[/]",
            _spread(row.cpu_ratio),
            _spread(row.ranges_cpu_ratio),
        )
    return table


def _costs(rows: Iterable[Row]) -> Table:
    columns = "post ms", "gap ms", "quiet gap ms", "CPU ms readers", "of ceiling", "CPU ms producers", "contact ms"
    table = _table("costs", "pair", "tokens", *columns, "memory/peer")
    for row in rows:
        times = row.post_s, row.gap_s, row.quiet_gap_s, row.readers_cpu_s, row.ceiling_cpu_s, row.producers_cpu_s
        table.add_row(*_names(row), *map(_ms, (*times, row.contact_s)), amount(max(0.0, row.contact_bytes.median)))
    return table


def _names(row: Row) -> tuple[str, str]:
    return row.pair, f"{row.tokens:,}"


def _contact(found: Sequence[FirstContact]) -> Table:
    table = _table("first contact of one reader", "ranks", "blocks", "ms", "memory/peer")
    for (ranks, blocks), some in _grouped(found, lambda one: (one.ranks, one.blocks)):
        grown = Spread.of(one.bytes_per_peer for one in some)
        table.add_row(
            str(ranks),
            f"{blocks:,}",
            _ms(Spread.of(one.seconds for one in some)),
            f"{amount(grown.median)} ({amount(max(0.0, grown.least))} to {amount(grown.most)})",
        )
    return table


def _acks(found: Sequence[Acks]) -> Table:
    table = _table("acknowledgements at one listener", "per second", "of a core", "p99 ms")
    table.add_row(
        _spread(Spread.of(one.per_s for one in found), "{:,.0f}"),
        _spread(Spread.of(one.core for one in found), "{:.1%}"),
        _ms(Spread.of(one.p99_s for one in found)),
    )
    return table


def _growth(found: Sequence[Point]) -> Table:
    columns = "descriptors", "prepare and post ms", "us per descriptor", "contact ms"
    table = _table("cost of a load on one worker, without NIXL", "what grows", "to", *columns)
    for point in found:
        table.add_row(
            point.axis,
            f"{point.value:,}",
            f"{point.descriptors:,}",
            f"{point.post_s * 1e3:.3g}",
            f"{point.post_s / max(1, point.descriptors) * 1e6:.3g}",
            f"{point.contact_s * 1e3:.3g}",
        )
    return table


def draw_growth(found: Sequence[Point], path: Path) -> None:
    """One panel for each thing that was varied.

    Raises:
        SpecError: `path` cannot be written.
    """
    groups = _grouped(found, lambda point: point.axis)
    with drawing(path) as figure:
        figure.set_size_inches(4 * len(groups), 3)
        figure.suptitle("What one worker spends on preparing and posting a load, without NIXL")
        panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
        for panel, (axis, points) in zip(panels, groups, strict=True):
            panel.plot([point.value for point in points], [point.post_s * 1e3 for point in points], marker="o")
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.set_xlabel(axis)
            panel.grid(alpha=0.3)
        panels[0].set_ylabel("ms")
        figure.tight_layout()


def _grouped(found: Sequence[T], key: Callable[[T], K]) -> list[tuple[K, list[T]]]:
    """In the order in which the keys first came."""
    groups: dict[K, list[T]] = {}
    for one in found:
        groups.setdefault(key(one), []).append(one)
    return list(groups.items())


def _spread(value: Spread, form: str = "{:.2f}") -> str:
    return f"{form.format(value.median)} ({form.format(value.least)} to {form.format(value.most)})"


def _ms(seconds: Spread) -> str:
    median, least, most = (f"{value * 1e3:.3g}" for value in (seconds.median, seconds.least, seconds.most))
    return f"{median} ({least} to {most})"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in ("pair", "what grows") else "right", no_wrap=True)
    return table
