"""``kvferry doctor``: what is wrong with this machine, with a link to another one, or with a running cluster."""

import asyncio
import signal
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvferry.cli.console import DIFFERENT, INTERRUPTED, examples, left_alone, out, page, reported_errors
from kvferry.cli.status import NAME_HELP
from kvferry.cluster.doctor.findings import Finding, Level, failed
from kvferry.cluster.manifest import DEFAULT_NAME, Role
from kvferry.errors import SpecError

SERVE = "serve"
MEGABYTES = 64
EXAMPLE = examples(
    "kvferry doctor",
    "kvferry doctor serve --port 4000  (on one host, and on the other:)",
    "kvferry doctor 10.0.0.7:4000",
    "kvferry doctor --cluster --name blue",
    "kvferry doctor --prefill http://10.0.0.7:8000 --decode http://10.0.0.8:8000",
)
BESIDE = 70  # columns of a terminal from which on what is said stands beside its name
COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "red"}


class Findings(msgspec.Struct, frozen=True):
    """What ``--json`` prints; `link` and `pairs` are null where they were not asked for."""

    problems: int
    warnings: int
    findings: list[Finding]
    link: Any = None
    pairs: Any = None


def doctor(
    target: Annotated[
        str | None, typer.Argument(help="HOST:PORT to measure the link to, or the word serve.", show_default=False)
    ] = None,
    cluster: Annotated[bool, typer.Option("--cluster", help="Ask running instances which pairs can work.")] = False,
    name: Annotated[str | None, typer.Option(help=f"{NAME_HELP} With --cluster.", show_default=False)] = None,
    prefill: Annotated[list[str] | None, typer.Option(help="URL of a prefill instance; may be repeated.")] = None,
    decode: Annotated[list[str] | None, typer.Option(help="URL of a decode instance; may be repeated.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to serve on; the advertised host.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to serve on; any free one.", min=0, max=65535)] = None,
    allow_public: Annotated[
        bool, typer.Option("--allow-public", help="Serve addresses that are not private, too.")
    ] = False,
    megabytes: Annotated[int, typer.Option(help="Size of the reads of a link.", min=1, max=1024)] = MEGABYTES,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look for what is wrong: on this machine, on a link to another one, or in a running cluster.

    Each line is ok, a warning or a problem, with what to do about it. Exit code 1 if there is a problem.
    """
    with reported_errors():
        asked = bool(cluster or name or prefill or decode)
        _require_sense(target, asked, host is not None or port is not None or allow_public, json)
        if target == SERVE:
            _serve(host, port or 0, allow_public)
            return
        with left_alone():
            found = _cluster(name, prefill or [], decode or []) if asked else _machine_or_link(target, megabytes)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        _show(found.findings)
    if failed(found.findings):
        raise typer.Exit(DIFFERENT)


def _require_sense(target: str | None, cluster: bool, serving: bool, json: bool) -> None:
    if target is not None and cluster:
        raise SpecError(f"{target} and --cluster (or --name, --prefill, --decode) are two questions; ask one")
    if serving and target != SERVE:
        raise SpecError("--host, --port and --allow-public belong to `kvferry doctor serve`")
    if json and target == SERVE:
        raise SpecError("`kvferry doctor serve` prints no JSON; the other side does")


def _machine_or_link(target: str | None, megabytes: int) -> Findings:
    if target is None:
        from kvferry.cluster.doctor import local

        return _findings(local.examine())
    from kvferry.cluster.doctor import link

    lines, report = link.examine(*link.parse_target(target), megabytes << 20)
    return _findings(lines, link=report)


def _cluster(name: str | None, prefill: Sequence[str], decode: Sequence[str]) -> Findings:
    from kvferry.cluster.doctor import pairs

    instances = []
    for role, urls in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        instances += [pairs.given(role, index, url) for index, url in enumerate(urls)]
    if name is not None or not instances:
        instances += pairs.of_cluster(name or DEFAULT_NAME)
    lines, found = pairs.examine(instances)
    return _findings(lines, pairs=found)


def _findings(lines: list[Finding], **more: Any) -> Findings:
    levels = [line.level for line in lines]
    return Findings(levels.count(Level.PROBLEM), levels.count(Level.WARNING), lines, **more)


def _show(lines: Sequence[Finding]) -> None:
    console = page()
    console.print(screen(lines, console.width))


def screen(lines: Sequence[Finding], width: int) -> Group:
    """All findings, and how many of them are not well; on a narrow terminal what is said stands below its name."""
    table = Table.grid(padding=(0, 1))
    beside = width >= BESIDE
    for column in ("level", "name", "text") if beside else ("level", "text"):
        table.add_column(column, no_wrap=column == "level", overflow="fold")
    for line in lines:
        said = Text(line.text)
        if line.fix:
            said.append(f"\nfix: {line.fix}", style="cyan")
        name = Text(line.name, style="bold")
        level = Text(line.level, style=COLOURS[line.level])
        if beside:
            table.add_row(level, name, said)
        else:
            table.add_row(level, Text("\n").join((name, said)))
    return Group(table, Text(), _summary(lines))


def _summary(lines: Sequence[Finding]) -> Text:
    levels = [line.level for line in lines]
    counted = [(level, levels.count(level)) for level in (Level.PROBLEM, Level.WARNING) if level in levels]
    if not counted:
        return Text("Everything is well.", style="green")
    parts = [Text(f"{number} {level}{'s' if number > 1 else ''}", style=COLOURS[level]) for level, number in counted]
    return Text(", ").join(parts)


def _serve(host: str | None, port: int, allow_public: bool) -> None:
    from kvferry.cluster.doctor import link, machine

    address = host or machine.default_host()

    def ready(where: str, number: int) -> None:
        shown = f"[{where}]" if ":" in where else where
        out.print(f"serving on {shown}:{number}; on the other host: kvferry doctor {shown}:{number}", markup=False)
        out.print("Ctrl-C ends it.")

    asked_to_end = []

    def end(task: asyncio.Task[None]) -> None:
        asked_to_end.append(signal.SIGTERM)
        task.cancel()

    async def run() -> None:
        task = asyncio.current_task()
        assert task
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end, task)
        try:
            await link.Server(allow_public).run(address, port, ready)
        except asyncio.CancelledError:
            if not asked_to_end:
                raise

    try:
        asyncio.run(run())
    except KeyboardInterrupt as error:
        raise typer.Exit(INTERRUPTED) from error
