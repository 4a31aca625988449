"""``kvferry bench serve``: real engines and a router, the same prompts for every contender, in one interleaved run."""

import datetime
import math
import secrets
import shlex
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from kvferry.bench.machine import load
from kvferry.bench.serve.contenders import USUAL, chosen
from kvferry.bench.serve.described import described
from kvferry.bench.serve.figures import METRICS
from kvferry.bench.serve.plots import plots
from kvferry.bench.serve.question import MOST, Question
from kvferry.bench.serve.report import report
from kvferry.bench.serve.result import Load, Outcome, Prompts, Result, Stall, Turn
from kvferry.bench.serve.running import Run
from kvferry.bench.serve.statistics import parse_goodput
from kvferry.cli import bench_serve_options as options
from kvferry.cli.bench_serve_tables import show
from kvferry.cli.console import INTERRUPTED, NOT_RUN, err, out, reported_errors
from kvferry.cluster.manifest import Router
from kvferry.cluster.spec import Layout
from kvferry.cluster.tiny import tiny
from kvferry.errors import SpecError

MODEL, STALL_MODEL = "qwen2", "qwen3-fat"


class Shown:
    """Progress of a run: a bar for turns and one for requests; without a terminal, a line for each turn."""

    def __init__(self, turns: int) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self.bars = Progress(*columns, console=err, disable=not err.is_terminal)
        self._turns: TaskID = self.bars.add_task("turns", total=turns)
        self._requests: TaskID = self.bars.add_task("", total=None)

    def turn(self, turn: Turn) -> None:
        self.bars.update(self._turns, description=f"{turn.contender}, round {turn.round + 1}")

    def ended(self, turn: Turn) -> None:
        self.bars.advance(self._turns)
        what = f"{turn.contender}, round {turn.round + 1}: {turn.outcome}"
        err.print(what + (f": {turn.reason}" if turn.reason else ""), markup=False)

    def say(self, what: str) -> None:
        self.bars.reset(self._requests, total=None, description=what)

    def answered(self, done: int, total: int) -> None:
        self.bars.update(self._requests, completed=done, total=total)


def serve(
    contender: options.Contender = None,
    python: options.Python = None,
    model: options.Model = None,
    prefill: options.Prefill = "tp=1",
    decode: options.Decode = "tp=1",
    num_prompts: options.NumPrompts = 20,
    random_input_len: options.RandomInputLen = 1000,
    random_output_len: options.RandomOutputLen = 8,
    random_prefix_len: options.RandomPrefixLen = 0,
    request_rate: options.RequestRate = None,
    max_concurrency: options.MaxConcurrency = None,
    burstiness: options.Burstiness = 1.0,
    goodput: options.Goodput = None,
    percentile_metrics: options.PercentileMetrics = "ttft,tpot,itl,e2el",
    metric_percentiles: options.MetricPercentiles = "99",
    seed: options.Seed = None,
    num_warmups: options.NumWarmups = 2,
    max_num_seqs: options.MaxNumSeqs = 16,
    dtype: options.Dtype = "bfloat16",
    rounds: options.Rounds = 1,
    pin: options.Pin = False,
    router: options.Router = Router.GATEWAY,
    stall: options.Stall = False,
    stall_input_len: options.StallInputLen = 6000,
    stall_seconds: options.StallSeconds = 5.0,
    stall_turns: options.StallTurns = 5,
    idle: options.Idle = 5.0,
    deadline: options.Deadline = 300.0,
    json: options.Json = None,
    html: options.Html = None,
    logs: options.Logs = None,
) -> None:
    """Serve the same prompts with KVFerry, with other connectors and without any, and hold them beside each other.

    Every contender's engines are started for its turn, warmed up, asked under every load and stopped; then it is the
    next one's turn, and when all have had theirs the next round begins. Ctrl-C keeps what was measured.
    """
    with reported_errors():
        shown = _metrics(percentile_metrics)
        _require_place(json, html)
        drawn = secrets.randbelow(MOST) if seed is None else seed
        question = Question(
            model=model or tiny(STALL_MODEL if stall else MODEL),
            contenders=chosen(contender or USUAL, python or []),
            prompts=Prompts(num_prompts, random_input_len, random_output_len, random_prefix_len, burstiness, drawn),
            loads=_loads(request_rate or [math.inf], max_concurrency or [None]),
            rounds=rounds,
            prefill=Layout.parse(prefill),
            decode=Layout.parse(decode),
            stall=Stall(stall_input_len, stall_seconds, stall_turns) if stall else None,
            dtype=dtype,
            sequences=max_num_seqs,
            warmups=num_warmups,
            idle_s=idle,
            start_s=deadline,
            pinned=pin,
            own_front=router is Router.GATEWAY,
            percentiles=_percentiles(metric_percentiles),
            goodput_ms=parse_goodput(goodput or []),
        )
        directory = logs or Path(tempfile.mkdtemp(prefix="kvferry-serve-"))
        result = _measured(question, directory)
        show(result, shown)
        out.print(f"seed {drawn}; logs in {directory}", markup=False)
        _write(result, shown, json, html)
    _end(result)


def _require_place(json: Path | None, html: Path | None) -> None:
    """That results can be written, before an hour is spent on them. Raises ``SpecError``."""
    for option, path in (("--json", json), ("--html", html)):
        if path is not None and not path.parent.is_dir():
            raise SpecError(f"{option} {path}: there is no directory {path.parent}")
    if html is not None and find_spec("matplotlib") is None:
        raise SpecError("--html needs matplotlib: pip install 'kvferry[plot]'")


def _loads(rates: Sequence[float], bounds: Sequence[int | None]) -> tuple[Load, ...]:
    found = (Load(None if rate == math.inf else rate, bound) for rate in rates for bound in bounds)
    return tuple(dict.fromkeys(found))


def _metrics(text: str) -> tuple[str, ...]:
    named = tuple(part.strip() for part in text.split(",") if part.strip())
    if unknown := [name for name in named if name not in METRICS]:
        raise SpecError(f"--percentile-metrics {unknown[0]} is not one of {', '.join(METRICS)}")
    return named


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        return tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise SpecError(f"--metric-percentiles {text!r} are not numbers separated by commas") from None


def _measured(question: Question, logs: Path) -> Result:
    before, made = load(), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    shown = Shown(question.rounds * len(question.contenders))
    run = Run(question, logs, shown)
    with shown.bars:
        try:
            run.go()
        except KeyboardInterrupt:
            pass  # what there is is kept, and the result says that it is not all
        except SystemExit:
            pass  # SIGTERM, which a supervisor makes one of
    return described(question, run, shlex.join(["kvferry", *sys.argv[1:]]), made, before)


def _write(result: Result, metrics: Sequence[str], json: Path | None, html: Path | None) -> None:
    texts = []
    if json is not None:
        text = msgspec.json.format(msgspec.json.encode(result), indent=1).decode() + "\n"
        texts.append(("--json", json, text))
    if html is not None:
        texts.append(("--html", html, report(result, plots(result), metrics)))
    for option, path, text in texts:
        try:
            path.write_text(text)
        except OSError as error:
            raise SpecError(f"{option} {path} cannot be written: {error.strerror}") from error


def _end(result: Result) -> None:
    """Raises ``typer.Exit`` where the run was broken off, or nobody could be measured."""
    if not result.complete:
        err.print("kvferry: interrupted; everything it started is stopped")
        raise typer.Exit(INTERRUPTED)
    if not any(turn.outcome is Outcome.MEASURED for turn in result.turns):
        raise typer.Exit(NOT_RUN)
