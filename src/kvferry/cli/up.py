"""``kvferry up``: a whole cluster from one command, or from one file."""

import os
import select
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from kvferry.cli.console import INTERRUPTED, NOT_RUN, err, examples, out, reported_errors
from kvferry.cluster.flags import Flags, from_arguments
from kvferry.cluster.manifest import Manifest, Router, parse, read_yaml
from kvferry.cluster.state import Record, StateDirectory, one_at_a_time
from kvferry.errors import ClusterError, KVFerryError, SpecError

DEMO_LAYOUTS = ("pp=2", "dp=2")
FILES = (".yaml", ".yml")
POLL_S = 0.5
READY = b"serving"
LAST_LINES = 5
Serving = Callable[[str], None]
EXAMPLE = examples(
    "kvferry up ~/models/Llama-3.1-70B --prefill tp=2,pp=2 --decode tp=4,dp=2",
    "kvferry up MODEL --prefill-replicas 2 -- --max-model-len 32768",
    "kvferry up cluster.yaml --detach",
    "kvferry up --demo",
)
LAYOUT_HELP = "Layout of {}, such as tp=2,pp=2,dp=1; what is not named is 1."
ARG_HELP = "vLLM flags for {} only, as '--max-num-seqs 64'; may be repeated."


def up(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL|FILE] [-- VLLM FLAGS]",
            help="A model directory, a name in the Hugging Face cache, or a .yaml file; then flags of vllm serve.",
        ),
    ] = None,
    prefill: Annotated[str | None, typer.Option(help=LAYOUT_HELP.format("prefill"))] = None,
    decode: Annotated[str | None, typer.Option(help=LAYOUT_HELP.format("decode"))] = None,
    prefill_replicas: Annotated[int | None, typer.Option(help="Number of prefill instances; 1 if not given.")] = None,
    decode_replicas: Annotated[int | None, typer.Option(help="Number of decode instances; 1 if not given.")] = None,
    prefill_arg: Annotated[list[str] | None, typer.Option(help=ARG_HELP.format("prefill"))] = None,
    decode_arg: Annotated[list[str] | None, typer.Option(help=ARG_HELP.format("decode"))] = None,
    name: Annotated[str | None, typer.Option(help="Tells clusters of one machine apart.")] = None,
    host: Annotated[str | None, typer.Option(help="Address of the one URL; 127.0.0.1 if not given.")] = None,
    port: Annotated[int | None, typer.Option(help="Its port; 8080 if not given, or another one if taken.")] = None,
    router: Annotated[Router | None, typer.Option(help="What serves the one URL.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    devices: Annotated[str | None, typer.Option(help="GPU ids or CPU cores to use, as 0,1,2; all otherwise.")] = None,
    secret_file: Annotated[str | None, typer.Option(help="Secret of the instances; a fresh one otherwise.")] = None,
    start_timeout: Annotated[float | None, typer.Option(help="Seconds that an instance may take to start.")] = None,
    drain_timeout: Annotated[float | None, typer.Option(help="Seconds that requests under way may take.")] = None,
    demo: Annotated[bool, typer.Option("--demo", help="A small real model, prefill pp=2, decode dp=2.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Return once it serves; kvferry down ends it.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands for a shell; start none.")] = False,
) -> None:
    """Start prefill and decode instances, prove that they exchange KV caches, and serve them under one URL.

    Ctrl-C or SIGTERM drains and stops everything; a second one does not wait for requests.
    """
    with reported_errors():
        given, flags = _split(arguments or [])
        options = _options(
            {
                "name": name,
                "host": host,
                "port": port,
                "router": router and str(router),
                "served_model_name": served_model_name,
                "devices": devices and [device.strip() for device in devices.split(",")],
                "secret_file": secret_file,
                "start_timeout": start_timeout,
                "drain_timeout": drain_timeout,
                "vllm": _mapping(from_arguments(flags, "after --")),
                "prefill": _side("prefill", prefill, prefill_replicas, prefill_arg),
                "decode": _side("decode", decode, decode_replicas, decode_arg),
            }
        )
        manifest = _demo(given, options) if demo else _manifest(given, options)
        if dry_run:
            _print_script(manifest)
        else:
            _start(manifest, StateDirectory(manifest.name), detach)


def _split(arguments: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """The model or file, and vLLM's flags."""
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], arguments[1:]
    return None, arguments


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if value not in (None, {}, "")}


def _side(role: str, layout: str | None, replicas: int | None, arguments: Sequence[str] | None) -> dict[str, Any]:
    option = f"--{role}-arg"
    try:
        words = [word for argument in arguments or () for word in shlex.split(argument)]
    except ValueError as error:
        raise SpecError(f"{option}: {error}") from error
    return _options({"layout": layout, "replicas": replicas, "vllm": _mapping(from_arguments(words, option))})


def _mapping(flags: Flags) -> dict[str, Any]:
    """As they would stand in a file."""
    one_or_more = {flag: values[0] if len(values) == 1 else list(values) for flag, values in flags.items()}
    return {flag: value if value != [] else True for flag, value in one_or_more.items()}


def _manifest(given: str | None, options: Mapping[str, Any]) -> Manifest:
    if given is None:
        raise SpecError("a model or a cluster.yaml is needed; `kvferry up --demo` brings a small model along")
    if not given.endswith(FILES):
        return parse({"model": given, **options})
    raw = read_yaml(Path(given))
    return parse(_overlaid(raw, options) if isinstance(raw, Mapping) else raw, given)


def _overlaid(raw: Any, options: Mapping[str, Any]) -> Any:
    """Options over what a file says; what is no mapping there is for the check to refuse."""
    merged = dict(raw)
    for key, value in options.items():
        below = merged.get(key)
        merged[key] = _overlaid(below, value) if isinstance(value, Mapping) and isinstance(below, Mapping) else value
    return merged


def _demo(given: str | None, options: Mapping[str, Any]) -> Manifest:
    if given is not None:
        raise SpecError(f"--demo brings its own model; leave out {given} or --demo")
    from kvferry.cluster.manifest import Role
    from kvferry.cluster.models import NAME, smollm2_for

    sides = {role: {"layout": layout} for role, layout in zip(("prefill", "decode"), DEMO_LAYOUTS, strict=True)}
    base = {"model": NAME, "served_model_name": NAME, **sides}
    wanted = parse(_overlaid(base, options))
    layouts = [wanted.layout(role, 0) for role in Role]
    # Not on standard output: with --dry-run that is a script.
    model, _ = smollm2_for(layouts, progress=lambda what: err.print(f"{NAME}: {what}", markup=False))
    return parse(_overlaid({**base, "model": str(model)}, options))


def _print_script(manifest: Manifest) -> None:
    from kvferry.cluster.preparation import prepare
    from kvferry.cluster.recipes import shell
    from kvferry.cluster.recipes.processes import recipe

    # Keys of its own: a cluster of that name may be running, and its instances read their secret again when restarted.
    state = StateDirectory(f"{manifest.name}.by-hand")
    prepared = prepare(manifest, state, fresh_secret=state.secret)
    typer.echo(shell.script(recipe(prepared, state.path, state.admin_key, os.environ), os.environ), nl=False)


def _start(manifest: Manifest, state: StateDirectory, detach: bool) -> None:
    from kvferry.cluster.preparation import Prepared, prepare

    try:
        state.acquire()
    except ClusterError as error:
        raise SpecError(str(error)) from error
    try:
        with one_at_a_time(state.root):
            prepared: Prepared = prepare(manifest, state, fresh_secret=state.secret)
            state.write_record(Record(os.getpid(), prepared.ports, prepared.devices))
        state.write_keys()
        if detach:
            _detached(state, lambda serving: _run(prepared, state, serving))
            return
        served = _run(prepared, state, lambda url: _announce(manifest, url))
    finally:
        state.release()
    if not served:
        raise KeyboardInterrupt
    out.print("stopped; nothing is left running")


def _run(prepared: Any, state: StateDirectory, serving: Serving) -> bool:
    from kvferry.cli.table import view
    from kvferry.cluster.session import Session

    with view() as shown:
        session = Session(prepared.allocator, prepared.members, prepared.front, state, shown)
        try:
            return session.run(serving)
        except KVFerryError:
            err.print(f"kvferry: logs are in {state.logs}", markup=False)
            raise


def _announce(manifest: Manifest, url: str) -> None:
    out.print(f"serving {manifest.served_name} on {url}/v1; Ctrl-C drains and stops it", markup=False)


def _detached(state: StateDirectory, run: Callable[[Serving], bool]) -> None:
    """Go on in a process of its own session; return when it serves, exit as it does when it does not come to that."""
    reading, writing = os.pipe()
    out.file.flush()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _be_detached(state, run, writing)
    os.close(writing)
    state.hand_over()
    try:
        _await_serving(state, child, reading)
    except KeyboardInterrupt:
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
        raise
    finally:
        os.close(reading)


def _be_detached(state: StateDirectory, run: Callable[[Serving], bool], writing: int) -> NoReturn:
    """The child: its output goes to its log, and it never returns to its parent's code."""
    code = INTERRUPTED
    try:
        os.setsid()
        log = os.open(state.own_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for descriptor, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(descriptor, target)
        state.write_record(Record(os.getpid(), state.record().ports, state.record().devices))
        with reported_errors():
            code = 0 if run(lambda _: _tell(writing)) else INTERRUPTED
    except typer.Exit as error:
        code = error.exit_code
    finally:
        state.release()
        sys.stdout.flush()
        os._exit(code)


def _tell(writing: int) -> None:
    try:
        os.write(writing, READY)
    except BrokenPipeError:
        out.print("nobody waited for it to serve")
    os.close(writing)


def _await_serving(state: StateDirectory, child: int, reading: int) -> None:
    from kvferry.cli.table import view
    from kvferry.cluster.control import status

    with view() as shown:
        while not select.select([reading], [], [], POLL_S)[0]:
            try:
                shown.show(status(state))
            except ClusterError:
                continue  # it does not listen yet, or not any more, which the pipe will say
        served = os.read(reading, len(READY)) == READY
        if served:
            shown.show(status(state))
    if not served:
        _exit_as(state, child)
    now = status(state)
    out.print(f"serving {now.model} on {now.url}/v1; see kvferry status, kvferry logs, kvferry down", markup=False)


def _exit_as(state: StateDirectory, child: int) -> NoReturn:
    """What the child said last, and its exit code."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    lines = [line for line in state.own_log.read_text().splitlines() if line.strip()] if state.own_log.exists() else []
    said = next((at for at, line in enumerate(lines) if line.startswith("kvferry: ")), max(0, len(lines) - LAST_LINES))
    for line in lines[said:]:
        err.print(line, markup=False)
    raise typer.Exit(code if code > 0 else NOT_RUN)
