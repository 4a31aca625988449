"""A result as one HTML page that needs nothing else: tables, pictures, and how it was measured."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from kvferry.bench.serve.figures import METRICS, idle, not_measured, rows, stall_rows
from kvferry.bench.serve.result import Result
from kvferry.bench.spread import Spread

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; font-size: 0.85rem; }
th, td { padding: 0.2rem 0.7rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child, td.text { text-align: left; }
td.text { white-space: normal; }
.scroll { overflow-x: auto; }
svg { max-width: 100%; height: auto; }
.warning { background: #fff3cd; padding: 0.5rem 1rem; }
"""


def report(result: Result, pictures: Mapping[str, str], metrics: Sequence[str]) -> str:
    """The page; `pictures` are SVG texts by title, `metrics` those to show."""
    return "".join(_page(result, pictures, metrics))


def _page(result: Result, pictures: Mapping[str, str], metrics: Sequence[str]) -> Iterator[str]:
    title = f"Serving {escape(result.model.name)}: prefill {escape(result.prefill)}, decode {escape(result.decode)}"
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
    yield f"<style>{STYLE}</style></head><body><h1>{title}</h1>"
    yield f"<p>{escape(result.made)}, <code>{escape(result.command)}</code></p>"
    if not result.complete:
        yield '<p class="warning">The run was broken off; what follows is what had been measured.</p>'
    yield from _results(result, metrics)
    for name, svg in pictures.items():
        yield f"<h2>{escape(name)}</h2>{svg}"
    yield from _method(result)
    yield "</body></html>\n"


def _results(result: Result, metrics: Sequence[str]) -> Iterator[str]:
    found = rows(result)
    for load in result.loads:
        here = [row for row in found if row.load == load.label]
        if not here:
            continue
        percentiles = list(here[0].latencies["ttft"])
        heads = [f"{METRICS[metric][0]} {_percentile(name)} ms" for metric in metrics for name in percentiles]
        goodput = ["good requests/s"] if any(row.goodput for row in here) else []
        more = "CPU s per request", "through connector", "text as plain's", "load average"
        yield f"<h2>{escape(load.label)}</h2>"
        yield _table(
            ("contender", "rounds", "answered", "failed", "requests/s", *goodput, *heads, *more),
            (
                (
                    row.contender,
                    row.rounds,
                    row.completed,
                    row.failed,
                    spread(row.throughput),
                    *([spread(row.goodput) if row.goodput else ""] if goodput else []),
                    *(spread(row.latencies[metric][name]) for metric in metrics for name in percentiles),
                    f"{sum(one for name, one in row.cpu_s.items() if name != 'client'):.3f}",
                    "" if row.moved is None else f"{row.moved:.0%}",
                    "" if row.same is None else f"{row.same:.0%}",
                    spread(row.load_average),
                )
                for row in here
            ),
        )
        legs = sorted({leg for row in here for leg in row.legs})
        yield "<h3>Parts of a request, mean ms</h3>"
        yield _table(
            ("part", *(row.contender for row in here)),
            ((leg, *(f"{row.legs[leg]:.1f}" if leg in row.legs else "" for row in here)) for leg in legs),
        )
    if stalled := stall_rows(result):
        yield "<h2>A running request while long prompts arrive</h2>"
        yield _table(
            (
                *("contender", "watched", "quiet p99 ms", "p99 ms meanwhile", "ratio", "p99 ms between"),
                *("prompts", "failed", "one prompt ms"),
            ),
            (
                (
                    row.contender,
                    row.watched,
                    *(spread(each) for each in (row.quiet_ms, row.busy_ms, row.ratio)),
                    "" if row.between_ms is None else spread(row.between_ms),
                    row.pulls,
                    row.failed,
                    spread(row.pull_ms),
                )
                for row in stalled
            ),
        )
    if resting := idle(result):
        names = list(dict.fromkeys(name for of in resting.values() for name in of if name != "client"))
        yield "<h2>Processor seconds per idle second</h2>"
        cells = ((who, *(spread(of[name]) if name in of else "" for name in names)) for who, of in resting.items())
        yield _table(("contender", *names), cells)
    if missing := not_measured(result):
        yield "<h2>Not measured</h2>"
        yield _table(("contender", "outcome", "reason"), missing)


def _method(result: Result) -> Iterator[str]:
    asked, machine = result.prompts, result.machine
    bounds = ", ".join(f"{name} {bound:g} ms" for name, bound in result.goodput_ms.items())
    lines = [
        f"Each load: {asked.count} requests of {asked.prefix_len + asked.input_len} random tokens with "
        f"{asked.output_len} to answer, greedy; seed {asked.seed}. All contenders get the same prompts at the same "
        "times, other ones in each round and under each load.",
        result.interleaving,
        "TTFT, TPOT, ITL, E2EL and goodput are as vllm bench serve defines them, taken by one client on the same "
        "machine. Figures are medians over rounds with (least to greatest); with one round the three are one.",
        "Every engine has the same flags but for its connector. On CPU each has one thread for computing, and the same "
        "cure: a sleep of 20 us where vLLM's message queues would otherwise call sched_yield without end.",
        '"Through connector" is what the decode engine says it took from its connector, of all prompt tokens; what it '
        "did not take it computed. Text as plain's: the share of answers that are letter for letter those of one plain "
        "engine; roundings differ between batches, so in less than float32 some differ without a fault.",
        "Parts of a request are means of histograms that engines and the gateway export. They overlap. The load "
        "average is of the machine when the load had ended, with everything that others ran on it.",
        f"Machine: {machine.cores} cores ({machine.processor}), {machine.memory_bytes / 1e9:.0f} GB, "
        f"{machine.accelerators} accelerators; load average {machine.load_before:.1f} before and "
        f"{machine.load_after:.1f} after. Only ratios of one run say something about the software.",
        f"Model: {result.model.kv_bytes_per_token:,} bytes of KV cache per token, dtype {result.model.dtype}.",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in result.versions.items()) + ".",
    ]
    if result.pinned:
        lines.append(
            "Each engine with all its processes had an equal share of the cores to itself (taskset); what is in front "
            "of engines, servers beside them and the client had all cores."
        )
    if bounds:
        lines.append(f"A good request has: {bounds}.")
    if (stall := result.stall) is not None:
        lines.append(
            f"Running request: watched {stall.turns} times, {stall.seconds:g} s in quiet, then {stall.seconds:g} s "
            f"while a prompt of {stall.input_len} tokens is sent again as soon as it was answered with one token. "
            "The prefill engine has it in its prefix cache, so it costs it nothing; other engines keep no "
            "prefixes. Only plain-cached does, and shows what such a prompt costs that need be neither moved nor "
            "computed: the step that gives its token looks at its whole KV cache. Between is without those steps."
        )
    yield "<h2>Method</h2>" + "".join(f"<p>{escape(line)}</p>" for line in lines)
    yield _table(("contender", "in front", "note"), ((one.name, one.front, one.note) for one in result.contenders))


def spread(value: Spread, form: str = "{:.3g}") -> str:
    """``median (least to greatest)``, or one number where they are one."""
    median, least, most = (plain_number(each, form) for each in (value.median, value.least, value.most))
    return median if least == most else f"{median} ({least} to {most})"


def plain_number(value: float, form: str = "{:.3g}") -> str:
    """Three digits, never with an exponent."""
    return f"{value:,.0f}" if abs(value) >= 1000 else form.format(value)


def _percentile(name: str) -> str:
    return name if name == "median" else f"p{name}"


def _table(heads: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "".join(f"<tr>{''.join(map(_cell, line))}</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(value: object) -> str:
    text = str(value)
    kind = "" if text[:1].isdigit() or not text else ' class="text"'
    return f"<td{kind}>{escape(text)}</td>"
