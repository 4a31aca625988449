"""``kvferry status``: what a running cluster is doing."""

from typing import Annotated

import msgspec
import typer

from kvferry.cli.console import examples, page, reported_errors
from kvferry.cluster.manifest import DEFAULT_NAME
from kvferry.cluster.state import StateDirectory

NAME_HELP = "Which cluster, where there are several."
EXAMPLE = examples("kvferry status", "kvferry status --name blue --json")


def status(
    name: Annotated[str, typer.Option(help=NAME_HELP)] = DEFAULT_NAME,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the instances of a running cluster: layout, devices, state, load and log file."""
    from kvferry.cli.table import table
    from kvferry.cluster import control

    with reported_errors():
        found = control.status(StateDirectory(name))
        if json:
            typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        else:
            console = page()
            console.print(table(found, console.width))
