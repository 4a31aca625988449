"""``kvferry bench``: how fast, beside what this machine could do at best."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvferry.bench.machine import cores, load
from kvferry.bench.transfer import growth
from kvferry.bench.transfer.acks import Acks, acks
from kvferry.bench.transfer.contact import FirstContact, first_contact
from kvferry.bench.transfer.growth import Point
from kvferry.bench.transfer.question import PAIRS, Order, Pair, Question, Transport, What
from kvferry.bench.transfer.report import Machine, Measured, report
from kvferry.bench.transfer.rounds import rounds, samples_expected
from kvferry.cli.bench_compare import compare
from kvferry.cli.bench_serve import serve
from kvferry.cli.bench_tables import draw_growth, show
from kvferry.cli.console import INTERRUPTED, err, examples, reported_errors
from kvferry.cli.figures import picture_format
from kvferry.cluster.blueprint import DTYPES, SIZE_LIMIT, CacheShape, cache_shape
from kvferry.cluster.spec import read_config_file, read_model_config
from kvferry.errors import SpecError

app = typer.Typer(
    help="Measure, beside what this machine could do at best.", no_args_is_help=True, rich_markup_mode=None
)

EXAMPLE = examples(
    "kvferry bench transfer --transport tcp",
    "kvferry bench transfer --pair tp=2,pp=2:tp=4 --json result.json",
    "kvferry bench transfer --measure growth --plot growth.svg",
)
SERVE_EXAMPLE = examples(
    "kvferry bench serve --max-concurrency 1 --json run.json --html run.html",
    "kvferry bench serve --stall --contender kvferry --contender nixl",
)
COMPARE_EXAMPLE = examples("kvferry bench compare before.json after.json")
TOKENS = (1000, 6000)
MOST_ROUNDS = 1000
ACKS_PER_S, ACKS_FOR_S = 2000, 5.0
CONTACT_BLOCKS = (1_000, 1_000_000)


class Run:
    """Collects results one by one under a progress bar; Ctrl-C ends the collecting and keeps what is there."""

    def __init__(self, measure: What, question: Question) -> None:
        self.found: list[Any] = []
        self.complete = False
        self._measure, self._question = measure, question
        self._load_before = load()

    def collect(self) -> None:
        total, source = _source(self._measure, self._question)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, console=err, disable=not err.is_terminal) as progress:
            task = progress.add_task(f"measuring {self._measure}", total=total)

            async def run() -> None:
                async for one in source:
                    self.found.append(one)
                    progress.advance(task)

            with contextlib.suppress(KeyboardInterrupt):
                asyncio.run(run())
                self.complete = True

    def measured(self) -> Measured:
        machine = Machine(cores(), self._load_before, load())
        found: Any = report(self._question, self.found) if self._measure is What.PAIRS else self.found
        return Measured(complete=self.complete, machine=machine, **{self._measure.value: found})


def _source(measure: What, question: Question) -> tuple[int, AsyncIterator[Any]]:
    """How many results there will be, and the results."""
    match measure:
        case What.PAIRS:
            return samples_expected(question), rounds(question)
        case What.CONTACT:
            return question.rounds * len(CONTACT_BLOCKS), _contacts(question)
        case What.ACKS:
            return question.rounds, _acks(question)
        case What.GROWTH:
            return growth.POINTS, _growth(question)


async def _contacts(question: Question) -> AsyncIterator[FirstContact]:
    for _ in range(question.rounds):
        for blocks in CONTACT_BLOCKS:
            yield await first_contact(blocks, question.transport)


async def _acks(question: Question) -> AsyncIterator[Acks]:
    for _ in range(question.rounds):
        yield await acks(ACKS_PER_S, ACKS_FOR_S)


async def _growth(question: Question) -> AsyncIterator[Point]:
    for point in growth.points(question.shape, question.block_tokens):
        yield point


def transfer(
    pair: Annotated[
        list[str] | None,
        typer.Option(help=f"PRODUCER:CONSUMER layouts; may be repeated. Without any: {', '.join(PAIRS)}."),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(help=f"Tokens of a prompt; may be repeated. Without any: {', '.join(map(str, TOKENS))}."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Model directory or config.json to take the shape from.", show_default=False)
    ] = None,
    layers: Annotated[int, typer.Option(help="Layers.")] = 8,
    kv_heads: Annotated[int, typer.Option(help="KV heads of a layer.")] = 12,
    head_size: Annotated[int, typer.Option(help="Elements of a head.")] = 128,
    latent: Annotated[
        int, typer.Option(help="Elements of a latent cache (MLA) per token and layer, instead of heads.")
    ] = 0,
    dtype: Annotated[str, typer.Option(help=f"Of the KV cache: {', '.join(DTYPES)}.")] = "bfloat16",
    block_size: Annotated[int, typer.Option(help="Tokens per KV cache block.")] = 16,
    blocks: Annotated[Order, typer.Option(help="How the blocks of a prompt lie in a cache.")] = Order.SCATTERED,
    transport: Annotated[Transport, typer.Option(help="What UCX may take.")] = Transport.AUTO,
    round_count: Annotated[int, typer.Option("--rounds", help="How often everything is measured in turn.")] = 5,
    measure: Annotated[
        What,
        typer.Option(
            help="Pairs of layouts; the first contact with a large producer; acknowledgements at a listener; the "
            "growth of what preparing a load costs."
        ),
    ] = What.PAIRS,
    json: Annotated[Path | None, typer.Option(help="Write all figures there.", show_default=False)] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the growth: a .svg or .png file.", show_default=False)] = None,
) -> None:
    """Move KV caches between processes without engines, and hold that against what this machine can do.

    Producer processes hold caches, a listener grants them, consumer processes read them with the connector's own
    reader. The ceiling is measured beside it: the same processes read as many bytes of the same memory in one piece.
    Ctrl-C prints what was measured until then.
    """
    with reported_errors():
        if not 1 <= round_count <= MOST_ROUNDS:
            raise SpecError(f"--rounds {round_count} is not between 1 and {MOST_ROUNDS}")
        if plot is not None:
            if measure is not What.GROWTH:
                raise SpecError("--plot draws the growth; add --measure growth")
            picture_format(plot, "--plot")
        if json is not None and not json.parent.is_dir():
            raise SpecError(f"--json {json}: there is no directory {json.parent}")
        shape = _shape(model, layers, kv_heads, head_size, latent, dtype)
        question = Question(
            shape=shape,
            pairs=tuple(Pair.parse(text) for text in pair or PAIRS) if measure is What.PAIRS else (growth.PAIR,),
            tokens=tuple(tokens or TOKENS),
            block_tokens=block_size,
            rounds=round_count,
            transport=transport,
            order=blocks,
        )
        run = Run(measure, question)
        try:
            run.collect()
        finally:
            if run.found:
                measured = run.measured()
                show(measured)
                if json is not None:
                    _write(json, measured)
                if plot is not None:
                    draw_growth(run.found, plot)
    if not run.complete:
        err.print("kvferry: interrupted; everything it started is stopped")
        raise typer.Exit(INTERRUPTED)


def _shape(model: Path | None, layers: int, heads: int, head_size: int, latent: int, dtype: str) -> CacheShape:
    if dtype not in DTYPES:
        raise SpecError(f"--dtype {dtype} is not one of {', '.join(DTYPES)}")
    if model is not None:
        return cache_shape(read_config_file(model) if model.is_file() else read_model_config(model), dtype)
    sizes = {"--layers": layers, "--kv-heads": heads, "--head-size": head_size}
    for option, value in {**sizes, **({"--latent": latent} if latent else {})}.items():
        if not 1 <= value <= SIZE_LIMIT:
            raise SpecError(f"{option} {value} is not between 1 and {SIZE_LIMIT}")
    element = 4 if dtype == "float32" else 2
    if latent:
        return CacheShape("latent", layers, 1, latent * element, dtype)
    return CacheShape("attention", layers, heads, 2 * head_size * element, dtype)


def _write(path: Path, measured: Measured) -> None:
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(measured), indent=2) + b"\n")
    except OSError as error:
        raise SpecError(f"--json {path} cannot be written: {error.strerror}") from error


app.command(epilog=EXAMPLE)(transfer)
app.command(epilog=SERVE_EXAMPLE)(serve)
app.command(epilog=COMPARE_EXAMPLE)(compare)
