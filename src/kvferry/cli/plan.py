"""``kvferry plan``: what a pair of layouts would do, from the model's config.json alone."""

import math
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Group
from rich.text import Text

from kvferry.cli.console import BAD_INPUT, err, examples, page, reported_errors
from kvferry.cli.figures import picture_format
from kvferry.cli.grouping import grouped, inclusive, numbered
from kvferry.cli.picture import save_picture
from kvferry.cli.tables import Rows
from kvferry.cli.units import amount, duration
from kvferry.cluster.blueprint import DTYPES
from kvferry.cluster.layer_reads import Link, Question
from kvferry.cluster.pairing import Plan, Totals, measured_link, report
from kvferry.cluster.spec import Layout, read_config_file, read_model_config
from kvferry.errors import SpecError

TOKENS_LIMIT = 10_000_000
BLOCK_LIMIT = 4096
ASSUMED_GBPS = 100.0
EXAMPLE = examples(
    "kvferry plan ~/models/Llama-3.1-70B --prefill tp=4,pp=2 --decode tp=8",
    "kvferry plan config.json --prefill pp=4 --decode tp=4 --picture reads.svg",
    "kvferry plan config.json --prefill tp=8,dcp=4 --decode tp=4,dcp=2,pp=2",
)


def plan(
    model: Annotated[Path, typer.Argument(help="Model directory, or a config.json; no weights are needed.")],
    prefill: Annotated[
        str,
        typer.Option(
            help="Layout, such as tp=2,pp=3,dp=1,partition=1+2+1 or tp=8,dcp=4,interleave=16; what is not named is 1."
        ),
    ],
    decode: Annotated[str, typer.Option(help="Layout of the decode side.")],
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 6000,
    block_size: Annotated[int, typer.Option(help="Tokens per KV cache block.")] = 16,
    dtype: Annotated[str, typer.Option(help=f"Of weights and KV cache: {', '.join(DTYPES)}.")] = "bfloat16",
    gbps: Annotated[
        float | None,
        typer.Option(help=f"Link speed of one worker in 1e9 bits per second; {ASSUMED_GBPS:g} if not known."),
    ] = None,
    measured: Annotated[
        Path | None, typer.Option(help="Take the link speed from a log that KVFERRY_TRANSFER_LOG made.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON: every read, all numbers in bytes.")] = False,
    picture: Annotated[
        list[Path] | None,
        typer.Option(help="Draw who reads what from whom: a .svg or .png file; may be repeated."),
    ] = None,
) -> None:
    """Say whether a pair of layouts works, what each rank holds, who reads what from whom, and how long it takes.

    Nothing is started. Exit code 2 if the pair cannot work, with every reason.
    """
    with reported_errors():
        question = _question(tokens, block_size, dtype, gbps, measured)
        for path in picture or ():
            picture_format(path, "--picture")
        answer = report(_config(model), Layout.parse(prefill), Layout.parse(decode), question)
        for path in picture or ():
            if answer.plan:
                save_picture(answer.plan, _name(model), path)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())
    elif answer.plan:
        page().print(screen(answer.plan, _name(model)))
    for reason in answer.reasons:
        err.print(f"kvferry: this pair cannot work: {reason}", markup=False)
    if not answer.works:
        raise typer.Exit(BAD_INPUT)


def _question(tokens: int, block_size: int, dtype: str, gbps: float | None, measured: Path | None) -> Question:
    for option, value, limit in (("--tokens", tokens, TOKENS_LIMIT), ("--block-size", block_size, BLOCK_LIMIT)):
        if not 1 <= value <= limit:
            raise SpecError(f"{option} {value} must be between 1 and {limit}")
    if dtype not in DTYPES:
        raise SpecError(f"--dtype {dtype} is not one of {', '.join(DTYPES)}")
    return Question(tokens, block_size, dtype, _link(gbps, measured))


def _link(gbps: float | None, measured: Path | None) -> Link:
    if gbps is not None and measured is not None:
        raise SpecError("--gbps and --measured both give a link speed; name one")
    if measured is not None:
        return measured_link(measured)
    if gbps is None:
        return Link(ASSUMED_GBPS, "assumed")
    if not (math.isfinite(gbps) and gbps > 0):
        raise SpecError(f"--gbps {gbps:g} is not a positive number")
    return Link(gbps, "given")


def _config(model: Path) -> dict[str, Any]:
    if model.is_file():
        return read_config_file(model)
    return read_model_config(model)


def _name(model: Path) -> str:
    path = model.resolve()
    return path.parent.name if path.name == "config.json" else path.stem if path.is_file() else path.name


def screen(planned: Plan, name: str) -> Group:
    """A plan for people; `name` is the model's."""
    pair = Text(f"{_short(planned.prefill.layout)}  ->  {_short(planned.decode.layout)}")
    return Group(
        Text("This pair works: ", style="green") + pair,
        Text(
            f"KV cache: {planned.kv_bytes_per_token:,} bytes per token in {planned.dtype}, "
            + (f"{planned.state_bytes:,} bytes of states per request, " if planned.state_bytes else "")
            + f"{amount(planned.kv_bytes_per_prompt)} per prompt of {planned.tokens:,} tokens."
        ),
        Text(),
        _memory_table(planned, name),
        Text(),
        _reads_table(planned),
        Text(),
        *map(Text, _totals_lines(planned)),
        Text(),
        _alternatives_table(planned),
        Text(),
        *(Text(f"Note: {note}.", style="dim") for note in planned.notes),
    )


def _memory_table(planned: Plan, name: str) -> Rows:
    """A model without recurrent layers has no column for their states; nor has the table of reads."""
    states = bool(planned.state_bytes)
    numbers = ("weights", "KV/token", *(["states"] if states else []), "KV/prompt")
    table = Rows(f"Memory of each rank ({name})", ("instance", "ranks", "layers", *numbers), numbers)
    for role, side in (("prefill", planned.prefill), ("decode", planned.decode)):
        for stage in side.stages:
            table.add(
                role,
                f"pp{stage.pp} {numbered('tp', 0, side.ranks)}",
                inclusive(stage.layers),
                amount(stage.weights_bytes),
                f"{stage.kv_bytes_per_token:,}",
                *([amount(stage.state_bytes)] if states else []),
                amount(stage.kv_bytes_per_prompt),
            )
    return table


def _reads_table(planned: Plan) -> Rows:
    states = bool(planned.state_bytes)
    numbers = ("reads each", "bytes/token each", *(["states each"] if states else []))
    table = Rows("Who reads what from whom", ("decode", "prefill", "layers", "heads", *numbers), numbers)
    for group in grouped(planned.reads, planned.tokens):
        table.add(
            group.readers,
            group.producers,
            inclusive(group.layers),
            inclusive(group.heads),
            str(group.reads_each),
            f"{group.bytes_per_token_each:,}",
            *([amount(group.state_bytes_each)] if states else []),
        )
    return table


def _totals_lines(planned: Plan) -> list[str]:
    totals = planned.totals
    copies = totals.moved_bytes // planned.kv_bytes_per_prompt
    replicas = "" if copies == 1 else f", {copies} times the prompt's: ranks that share a KV head each read it"
    lines = [
        f"Per prompt: {totals.readers:,} decode workers read {amount(totals.moved_bytes)}{replicas}.",
        f"Descriptors: {totals.descriptors.contiguous:,} if blocks are contiguous, "
        f"{totals.descriptors.scattered:,} if they are scattered.",
        *_interleave_lines(planned),
        f"Time: {duration(totals.seconds)} for {amount(totals.busiest_link_bytes)} on the busiest worker "
        f"at {planned.link.gbps:.4g} Gbit/s ({planned.link.source}).",
    ]
    if planned.prefill.dp > 1 or planned.decode.dp > 1:
        cores = f"{planned.prefill.dp} prefill and {planned.decode.dp} decode engine cores (dp)"
        lines.append(f"Of {cores} each prompt takes one and one; all cores of a side are alike.")
    return lines


def _interleave_lines(planned: Plan) -> list[str]:
    """What it costs that context parallel ranks take few tokens at a time, where it costs anything."""
    if not (better := planned.block_interleave):
        return []
    sharing = [side for side in (planned.prefill, planned.decode) if side.dcp > 1]
    at_most = min(side.interleave for side in sharing)
    run = "one token" if at_most == 1 else f"{at_most} tokens"
    where = "on both sides" if len(sharing) == 2 else f"where dcp is {sharing[0].dcp}"
    return [
        f"Ranks share out tokens differently on the two sides, so that a range is {run} of a layer at most. With "
        f"interleave={planned.block_tokens} (a block) {where}: {better.contiguous:,} or {better.scattered:,}."
    ]


def _alternatives_table(planned: Plan) -> Rows | Text:
    better = [other for other in planned.alternatives if min(_changes(other.totals, planned.totals)) < 0]
    if not better:
        return Text("No decode layout one step away on as many cards saves anything.")
    title = "Other decode layouts on as many cards, per prompt"
    columns = ("workers", "moved", "descriptors", "time", "KV/rank", "weights/rank")
    table = Rows(title, ("decode", *columns), columns)
    for other in better:
        table.add(_short(other.decode), *map(_change, _changes(other.totals, planned.totals)))
    return table


def _short(layout: str) -> str:
    """A layout without its sizes of 1."""
    return ",".join(part for part in layout.split(",") if not part.endswith("=1")) or layout


def _changes(new: Totals, old: Totals) -> list[int]:
    """Percent by which each figure changes, negative where it saves; descriptors of scattered blocks."""
    return [round(100 * (after / before - 1)) for after, before in zip(_costs(new), _costs(old), strict=True)]


def _costs(totals: Totals) -> tuple[float, ...]:
    return (
        totals.readers,
        totals.moved_bytes,
        totals.descriptors.scattered,
        totals.seconds,
        totals.kv_bytes_per_rank,
        totals.weights_bytes_per_rank,
    )


def _change(percent: int) -> Text:
    return Text(f"{percent:+}%", style="green" if percent < 0 else "red") if percent else Text("same")
