"""``kvferry verify``: the same greedy tokens through prefill and decode as from a plain engine."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from kvferry.cli.console import DIFFERENT, Readiness, examples, named_logs, out, page, reported_errors, step
from kvferry.cli.tables import Rows
from kvferry.cluster.commands import cpu_build_installed
from kvferry.cluster.dispatch import Completion, Dispatcher
from kvferry.cluster.launch import logging_transfers, start_instances
from kvferry.cluster.ports import free_ports, require_free
from kvferry.cluster.prompts import NamedPrompt, default_prompts, load_prompts
from kvferry.cluster.spec import InstanceSpec, Layout, check_layout, kv_bytes_per_token, read_model_config
from kvferry.cluster.supervisor import PeakMemory, Supervisor
from kvferry.cluster.tiny import tiny
from kvferry.cluster.verification import TIE_BOUNDS, Outcome, Verdict, Verifier, reference
from kvferry.errors import SpecError

CACHE_TOKENS = 8192
EXAMPLE = examples("kvferry verify --prefill tp=2,pp=2 --decode pp=3,partition=1+2+1")
LAYOUT_HELP = "Layout, such as tp=2,pp=3,dp=1,partition=1+2+1; what is not named is 1."


@dataclass(frozen=True)
class Plan:
    """Everything that can be known before anything starts."""

    plain: InstanceSpec
    prefill: InstanceSpec
    decode: InstanceSpec
    prompts: list[NamedPrompt]
    transfer_log: Path
    logs: Path


def verify(
    prefill: Annotated[str, typer.Option(help=LAYOUT_HELP)],
    decode: Annotated[str, typer.Option(help=LAYOUT_HELP)],
    model: Annotated[Path | None, typer.Option(help="Model directory; a tiny random model where not given.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="One prompt per line: text, or a JSON list of token ids.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 makes equality a fair test; bfloat16 has near ties.")] = "float32",
    port: Annotated[int, typer.Option(help="First of three ports for the instances; 0 picks free ones.")] = 0,
    max_model_len: Annotated[int, typer.Option(help="Longest prompt and answer, in tokens.")] = 2048,
    deadline: Annotated[float, typer.Option(help="Seconds that an instance may take to start.")] = 300.0,
    logs: Annotated[Path | None, typer.Option(help="Directory for the instances' logs.")] = None,
) -> None:
    """Compare prefill/decode over KVFerry with a plain engine; exit 1 if a token differs or nothing was moved."""
    with reported_errors():
        layouts = Layout.parse(prefill), Layout.parse(decode)
        chosen = _model(model, layouts)
        plan = _plan(chosen, layouts, prompts, dtype, port, max_model_len, logs)
        outcomes = _run(plan, dtype, deadline)
    if not all(outcome.verdict.good for outcome in outcomes):
        raise typer.Exit(DIFFERENT)


def _model(model: Path | None, layouts: Sequence[Layout]) -> Path:
    """The given model, or the first tiny one that can be split both ways.

    Raises:
        SpecError: there is none; the text says what is wrong with the given, or the usual, one.
    """
    candidates = [model] if model else [tiny("qwen2"), tiny("qwen2-6heads")]
    problems: list[SpecError] = []
    for candidate in candidates:
        try:
            config = read_model_config(candidate)
            for layout in layouts:
                check_layout(layout, config)
            return candidate
        except SpecError as error:
            problems.append(error)
    raise problems[0]


def _plan(
    model: Path,
    layouts: tuple[Layout, Layout],
    prompts: Path | None,
    dtype: str,
    port: int,
    max_model_len: int,
    logs: Path | None,
) -> Plan:
    if dtype not in TIE_BOUNDS:
        raise SpecError(f"--dtype {dtype} is not one of {', '.join(TIE_BOUNDS)}")
    config = read_model_config(model)
    chosen = load_prompts(prompts) if prompts else default_prompts(config.get("vocab_size", 256))
    cache = max(64 << 20, CACHE_TOKENS * kv_bytes_per_token(config, dtype))
    ports = [port, port + 1, port + 2] if port else free_ports(3)
    for taken in ports:
        require_free(taken)

    def spec(name: str, layout: Layout, at: int, role: str | None) -> InstanceSpec:
        return InstanceSpec(
            name, model, layout, at, role, dtype=dtype, max_model_len=max_model_len, kv_cache_bytes=cache
        )

    directory = logs or Path(tempfile.mkdtemp(prefix="kvferry-verify-"))
    transfer_log = directory / "transfers.jsonl"
    transfer_log.unlink(missing_ok=True)
    return Plan(
        plain=spec("plain", Layout(), ports[0], None),
        prefill=spec("prefill", layouts[0], ports[1], "kv_producer"),
        decode=logging_transfers(spec("decode", layouts[1], ports[2], "kv_consumer"), transfer_log),
        prompts=chosen,
        transfer_log=transfer_log,
        logs=directory,
    )


def _run(plan: Plan, dtype: str, deadline_s: float) -> list[Outcome]:
    cpu = cpu_build_installed()
    with (
        named_logs(plan.logs),
        Supervisor(plan.logs) as supervisor,
        PeakMemory(supervisor) as memory,
        Dispatcher() as dispatcher,
    ):
        expected = _expected(supervisor, dispatcher, plan, cpu, deadline_s)
        with step(f"starting prefill {plan.prefill.layout} and decode {plan.decode.layout}") as shown:
            start_instances(supervisor, [plan.prefill, plan.decode], cpu, Readiness(shown), deadline_s)
        outcomes = []
        verifier = Verifier(dispatcher, plan.prefill, plan.decode, plan.transfer_log, TIE_BOUNDS[dtype])
        with step("sending the prompts through prefill and decode") as shown:
            for outcome in verifier.run(plan.prompts, expected):
                shown.say(f"{outcome.name}: {outcome.verdict.value}")
                outcomes.append(outcome)
    _show(outcomes, plan, memory.bytes)
    return outcomes


def _expected(
    supervisor: Supervisor, dispatcher: Dispatcher, plan: Plan, cpu: bool, deadline_s: float
) -> list[Completion]:
    with step("asking a plain engine for the expected tokens") as shown:
        start_instances(supervisor, [plan.plain], cpu, Readiness(shown), deadline_s)
        shown.say("")
        expected = reference(dispatcher, plan.plain, plan.prompts)
        supervisor.stop(plan.plain.name)
    return expected


def _show(outcomes: Sequence[Outcome], plan: Plan, peak_bytes: int) -> None:
    numbers = ("tokens", "cached", "moved", "bytes", "ms")
    title = f"Prefill {plan.prefill.layout}  ->  decode {plan.decode.layout}"
    table = Rows(title, ("prompt", *numbers, "verdict"), numbers)
    for outcome in outcomes:
        table.add(*_row(outcome))
    page().print(table)
    for outcome in outcomes:
        if outcome.detail:
            out.print(f"{outcome.name}: {outcome.detail}", markup=False)
    good = sum(outcome.verdict.good for outcome in outcomes)
    out.print(f"{good} of {len(outcomes)} prompts agree; peak memory {peak_bytes / 1e9:.1f} GB; logs in {plan.logs}")


def _row(outcome: Outcome) -> list[str | Text]:
    colour = {Verdict.EQUAL: "green", Verdict.TIE: "yellow"}.get(outcome.verdict, "red")
    numbers = [outcome.tokens, outcome.hits.local, outcome.hits.external, outcome.moved.bytes]
    return [
        outcome.name,
        *(f"{number:,}" for number in numbers),
        f"{outcome.moved.ms:.1f}",
        Text(outcome.verdict.value, style=colour),
    ]
