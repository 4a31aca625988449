"""``kvferry bench compare``: two results of ``kvferry bench serve``."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvferry.bench.serve.compare import differences, known_schema, ratios
from kvferry.bench.serve.result import Result
from kvferry.cli.bench_serve_tables import show_ratios
from kvferry.cli.console import DIFFERENT, err, out, reported_errors
from kvferry.errors import SpecError


def compare(
    first: Annotated[Path, typer.Argument(help="A file that --json has written.")],
    second: Annotated[Path, typer.Argument(help="Another one.")],
    anyway: Annotated[bool, typer.Option("--anyway", help="Print ratios of runs that differ in more.")] = False,
) -> None:
    """Hold a saved run against another: ratios of medians, and how far they reach over the rounds.

    Runs are comparable if model, layouts, prompts, loads and machine are the same; if not, every difference is named
    and the exit code is 1.
    """
    with reported_errors():
        one, other = _read(first), _read(second)
    different = differences(one, other)
    for difference in different:
        err.print(f"kvferry: not comparable: {difference}", markup=False)
    if different and not anyway:
        raise typer.Exit(DIFFERENT)
    found = list(ratios(one, other))
    show_ratios(found)
    loads = (f"{result.machine.load_before:.1f} to {result.machine.load_after:.1f}" for result in (one, other))
    out.print("load average of the machine: {}, and {}".format(*loads))
    out.print("medians over rounds; the ratio reaches from least / greatest to greatest / least")
    if not found:
        out.print("no contender was measured under the same load in both")
    if different:
        raise typer.Exit(DIFFERENT)


def _read(path: Path) -> Result:
    try:
        result = msgspec.json.decode(path.read_bytes(), type=Result)
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise SpecError(f"{path} is no result of kvferry bench serve: {error}") from error
    if not known_schema(result):
        raise SpecError(f"{path} has schema {result.schema}, which this version does not know")
    return result
