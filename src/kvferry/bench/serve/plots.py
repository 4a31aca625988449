"""Pictures of a result, as SVG texts. matplotlib is loaded only when one is drawn."""

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvferry.bench.serve.compare import FIGURES, REFERENCES, Ratio, beside, measured, runs
from kvferry.bench.serve.figures import Row, StallRow, idle, rows, stall_rows
from kvferry.bench.serve.result import LoadRun, Result

STYLE = {"font.size": 9, "svg.hashsalt": "kvferry", "font.family": "DejaVu Sans", "svg.fonttype": "path"}
LATENCIES: tuple[tuple[str, Callable[[LoadRun], Sequence[float]]], ...] = (
    ("TTFT ms", lambda run: [answer.ttft_s * 1e3 for answer in run.answers if not answer.error]),
    ("ITL ms", lambda run: [itl * 1e3 for answer in run.answers if not answer.error for itl in answer.itl_s]),
    ("E2EL ms", lambda run: [answer.latency_s * 1e3 for answer in run.answers if not answer.error]),
)
SHOWN_LEGS = ("queue", "prefill", "claim", "connect", "follow", "read", "ack", "transfer", "first token")


def plots(result: Result) -> dict[str, str]:
    """SVG by title; of what was not measured there is none."""
    drawn: dict[str, str] = {}
    for load in result.loads:
        some = {name: under for name in measured(result) if (under := runs(result, name, load))}
        if some:
            drawn[f"Latencies, {load.label}"] = _latencies(some)
            drawn[f"Parts of a request, {load.label}"] = _legs([row for row in rows(result) if row.load == load.label])
    for reference in REFERENCES:
        if ratios := list(beside(result, reference)):
            drawn[f"In units of {reference}"] = _beside(ratios)
    if found := rows(result):
        drawn["Processor seconds per request"] = _stacked({f"{row.contender}, {row.load}": row.cpu_s for row in found})
    if resting := idle(result):
        heights = {
            name: {key: one.median for key, one in of.items() if key != "client"} for name, of in resting.items()
        }
        drawn["Processor seconds per idle second"] = _stacked(heights)
    if stalled := stall_rows(result):
        drawn["A running request while long prompts arrive"] = _stalls(stalled)
    return drawn


@contextlib.contextmanager
def _figure(width: float, height: float, panels: int = 1) -> Iterator[tuple[list[Any], io.StringIO]]:
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    text = io.StringIO()
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height))
        FigureCanvasSVG(figure)
        yield list(figure.subplots(1, panels, squeeze=False)[0]), text
        figure.tight_layout()
        figure.savefig(text, format="svg", metadata={"Date": None})
    text.seek(0)


def _text(file: io.StringIO) -> str:
    """Without what stands before the picture, so that it can be put into a page."""
    whole = file.getvalue()
    return whole[whole.index("<svg") :]


def _latencies(some: dict[str, list[LoadRun]]) -> str:
    with _figure(11, 0.8 + 0.35 * len(some), len(LATENCIES)) as (panels, text):
        for panel, (title, of) in zip(panels, LATENCIES, strict=True):
            values = [[value for run in found for value in of(run)] or [0.0] for found in some.values()]
            panel.boxplot(values, orientation="horizontal", whis=(1, 99), showfliers=False)
            panel.set_yticks(range(1, len(some) + 1), some if panel is panels[0] else [""] * len(some))
            panel.invert_yaxis()
            panel.set_xlabel(f"{title}; box: quartiles, whiskers: 1% and 99%" if panel is panels[0] else title)
            panel.set_xscale("log")
            panel.grid(axis="x", alpha=0.3)
    return _text(text)


def _beside(ratios: Sequence[Ratio]) -> str:
    """A panel for each figure, a line for each contender and load; 1 is the reference."""
    names = list(dict.fromkeys(f"{one.contender}, {one.load}" for one in ratios))
    with _figure(11, 0.9 + 0.3 * len(names), len(FIGURES)) as (panels, text):
        for panel, figure in zip(panels, FIGURES, strict=True):
            for one in (one for one in ratios if one.figure == figure):
                at, ratio = names.index(f"{one.contender}, {one.load}"), one.ratio
                panel.plot([ratio.least, ratio.most], [at, at], color="C0")
                panel.plot([ratio.median], [at], "o", color="C0")
            panel.axvline(1.0, color="0.5", linewidth=1)
            panel.set_yticks(range(len(names)), names if panel is panels[0] else [""] * len(names))
            panel.set_ylim(len(names) - 0.5, -0.5)
            panel.set_xscale("log")
            panel.set_xlabel(figure.removesuffix(" ms"))
            panel.grid(axis="x", alpha=0.3)
    return _text(text)


def _legs(found: Sequence[Row]) -> str:
    """Means of what each process measured; they overlap, so they stand beside each other."""
    names = [leg for leg in dict.fromkeys(leg for row in found for leg in row.legs) if leg.split(": ")[1] in SHOWN_LEGS]
    with _figure(11, 1 + 0.12 * max(1, len(names)) * max(2, len(found))) as ([panel], text):
        width = 0.8 / len(found)
        for at, row in enumerate(found):
            panel.barh(
                [place + at * width for place in range(len(names))],
                [row.legs.get(leg, 0.0) for leg in names],
                height=width,
                label=row.contender,
            )
        panel.set_yticks([place + 0.4 - width / 2 for place in range(len(names))], names)
        panel.invert_yaxis()
        panel.set_xlabel("mean ms")
        panel.legend(fontsize=7)
        panel.grid(axis="x", alpha=0.3)
    return _text(text)


def _stacked(heights: dict[str, dict[str, float]]) -> str:
    parts = list(dict.fromkeys(part for of in heights.values() for part in of))
    with _figure(11, 0.9 + 0.3 * len(heights)) as ([panel], text):
        left = [0.0] * len(heights)
        for part in parts:
            widths = [of.get(part, 0.0) for of in heights.values()]
            panel.barh(range(len(heights)), widths, left=left, label=part)
            left = [one + more for one, more in zip(left, widths, strict=True)]
        panel.set_yticks(range(len(heights)), list(heights))
        panel.invert_yaxis()
        panel.set_xlabel("processor seconds")
        panel.legend(fontsize=7)
        panel.grid(axis="x", alpha=0.3)
    return _text(text)


def _stalls(found: Sequence[StallRow]) -> str:
    with _figure(11, 0.9 + 0.4 * len(found)) as ([panel], text):
        places = range(len(found))
        for shift, title, of in (
            (0.0, "quiet", lambda row: row.quiet_ms),
            (0.4, "prompts come", lambda row: row.busy_ms),
        ):
            spreads = [of(row) for row in found]
            panel.barh(
                [place + shift for place in places],
                [one.median for one in spreads],
                height=0.38,
                xerr=[[one.median - one.least for one in spreads], [one.most - one.median for one in spreads]],
                label=title,
            )
        panel.set_yticks([place + 0.2 for place in places], [row.contender for row in found])
        panel.invert_yaxis()
        panel.set_xlabel("p99 of the time between two tokens, ms; median, least and greatest of the turns")
        panel.legend(fontsize=7)
        panel.grid(axis="x", alpha=0.3)
    return _text(text)
