"""``kvferry demo``: a real small model, prefill and decode in different layouts, one question."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvferry.cli.console import DIFFERENT, Readiness, examples, named_logs, out, page, reported_errors, step
from kvferry.cli.tables import Rows
from kvferry.cluster.chat import Answer, ask
from kvferry.cluster.commands import cpu_build_installed
from kvferry.cluster.dispatch import Dispatcher, Sampling
from kvferry.cluster.launch import logging_transfers, start_instances, start_router
from kvferry.cluster.models import smollm2_for
from kvferry.cluster.ports import free_ports, require_free
from kvferry.cluster.spec import InstanceSpec, Layout, check_layout, kv_bytes_per_token, read_model_config
from kvferry.cluster.supervisor import Supervisor
from kvferry.cluster.transfers import Moved, await_transfers, read_transfers

QUESTION = "What is the capital of France?"
CACHE_TOKENS = 4096
EXAMPLE = examples('kvferry demo --prefill tp=2,pp=2 --prompt "Name three rivers."')
MAX_MODEL_LEN = 2048
WARM_UP = list(range(1000, 1020))
SETTLE_S = 5.0


@dataclass(frozen=True)
class Plan:
    """Everything that can be known before anything starts."""

    prefill: InstanceSpec
    decode: InstanceSpec
    plain: InstanceSpec
    router_ports: tuple[int, int]
    transfer_log: Path
    logs: Path


def demo(
    prefill: Annotated[str, typer.Option(help="Layout of the prefill instance.")] = "pp=2",
    decode: Annotated[str, typer.Option(help="Layout of the decode instance.")] = "dp=2",
    prompt: Annotated[str, typer.Option(help="The question.")] = QUESTION,
    model: Annotated[Path | None, typer.Option(help="Model directory; SmolLM2-135M-Instruct where not given.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 48,
    port: Annotated[int, typer.Option(help="Port of the router; 0 picks a free one.")] = 0,
    deadline: Annotated[float, typer.Option(help="Seconds that an instance may take to start.")] = 300.0,
) -> None:
    """Answer one question through prefill, router and decode; exit 1 unless a plain engine gives the same tokens."""
    with reported_errors():
        layouts = Layout.parse(prefill), Layout.parse(decode)
        if port:
            require_free(port)
        plan = _plan(_model(model, layouts), layouts, port)
        equal = _run(plan, prompt, max_tokens, deadline)
    if not equal:
        raise typer.Exit(DIFFERENT)


def _model(model: Path | None, layouts: tuple[Layout, Layout]) -> Path:
    if model:
        for layout in layouts:
            check_layout(layout, read_model_config(model))
        return model
    with step("preparing SmolLM2-135M-Instruct") as shown:
        prepared, note = smollm2_for(layouts, progress=shown.say)
    if note:
        out.print(f"      [dim]{note}[/dim]")
    return prepared


def _plan(model: Path, layouts: tuple[Layout, Layout], port: int) -> Plan:
    cache = max(64 << 20, CACHE_TOKENS * kv_bytes_per_token(read_model_config(model), "float32"))
    ports = free_ports(5)
    logs = Path(tempfile.mkdtemp(prefix="kvferry-demo-"))

    def spec(name: str, layout: Layout, at: int, role: str | None) -> InstanceSpec:
        return InstanceSpec(name, model, layout, at, role, max_model_len=MAX_MODEL_LEN, kv_cache_bytes=cache)

    return Plan(
        prefill=spec("prefill", layouts[0], ports[0], "kv_producer"),
        decode=logging_transfers(spec("decode", layouts[1], ports[1], "kv_consumer"), logs / "transfers.jsonl"),
        plain=spec("plain", Layout(), ports[2], None),
        router_ports=(port or ports[3], ports[4]),
        transfer_log=logs / "transfers.jsonl",
        logs=logs,
    )


def _run(plan: Plan, prompt: str, max_tokens: int, deadline_s: float) -> bool:
    cpu = cpu_build_installed()
    with named_logs(plan.logs), Supervisor(plan.logs) as supervisor:
        router = _start(supervisor, plan, cpu, deadline_s)
        through_router, moved = _ask_router(router, plan, prompt, max_tokens)
        _show(moved)
        supervisor.stop("vllm-router", plan.prefill.name, plan.decode.name)
        with step("asking the same of a plain engine") as shown:
            start_instances(supervisor, [plan.plain], cpu, Readiness(shown), deadline_s)
            from_plain = ask(plan.plain.url, prompt, max_tokens)
    return _equal(through_router, from_plain, moved, plan)


def _start(supervisor: Supervisor, plan: Plan, cpu: bool, deadline_s: float) -> str:
    with step(f"starting prefill {plan.prefill.layout} and decode {plan.decode.layout}") as shown:
        start_instances(supervisor, [plan.prefill, plan.decode], cpu, Readiness(shown), deadline_s)
    with step("warming up every data parallel rank"), Dispatcher() as dispatcher:
        for spec in (plan.prefill, plan.decode):
            for rank in range(spec.layout.dp):
                dispatcher.complete(spec.url, WARM_UP, Sampling(max_tokens=2), rank if spec.layout.dp > 1 else None)
    with step("starting vllm-router") as shown:
        return start_router(supervisor, plan.prefill, plan.decode, plan.router_ports, Readiness(shown))


def _ask_router(router: str, plan: Plan, prompt: str, max_tokens: int) -> tuple[Answer, Moved]:
    earlier = len(read_transfers(plan.transfer_log))
    out.print(f"\n[bold]{prompt}[/bold]")
    answer = ask(router, prompt, max_tokens, show=lambda piece: out.print(piece, end="", markup=False))
    out.print("\n")
    readers = plan.decode.layout.core_workers
    everything = await_transfers(plan.transfer_log, lambda _: True, earlier + readers, SETTLE_S)
    return answer, Moved(everything.transfers[earlier:])


def _show(moved: Moved) -> None:
    numbers = ("bytes", "ms")
    table = Rows(f"Moved: {moved.bytes:,} bytes", ("from prefill worker", "to decode worker", *numbers), numbers)
    for transfer in moved.transfers:
        for read in transfer.reads:
            table.add(str(read.producer), str(transfer.consumer), f"{read.bytes:,}", f"{transfer.ms:.1f}")
    page().print(table)


def _equal(through_router: Answer, from_plain: Answer, moved: Moved, plan: Plan) -> bool:
    problem = _problem(through_router, from_plain, moved)
    if problem:
        out.print(f"[red]{problem}[/red]; logs in {plan.logs}")
        return False
    out.print(f"[green]the plain engine gives the same {len(from_plain.tokens)} tokens[/green]")
    shutil.rmtree(plan.logs, ignore_errors=True)
    return True


def _problem(through_router: Answer, from_plain: Answer, moved: Moved) -> str:
    if not through_router.tokens or through_router.tokens != from_plain.tokens:
        return f"the plain engine answers differently: {from_plain.text!r}"
    if not moved.transfers or not all(transfer.used for transfer in moved.transfers):
        return "the tokens are equal, but the KV cache did not come from the prefill instance"
    return ""
