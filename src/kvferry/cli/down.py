"""``kvferry down``: drain and stop a running cluster."""

from typing import Annotated

import typer

from kvferry.cli.console import examples, left_alone, out, reported_errors, step
from kvferry.cli.status import NAME_HELP
from kvferry.cluster.manifest import DEFAULT_NAME
from kvferry.cluster.state import StateDirectory
from kvferry.errors import StartError

EXAMPLE = examples("kvferry down", "kvferry down --name blue --now")


def down(
    name: Annotated[str, typer.Option(help=NAME_HELP)] = DEFAULT_NAME,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for requests under way.")] = False,
    deadline: Annotated[float, typer.Option(help="Seconds until it must have stopped.")] = 300.0,
) -> None:
    """Stop a cluster: it takes no new requests, finishes those under way, and leaves nothing running."""
    from kvferry.cluster.control import Request, asked

    with reported_errors(), left_alone("the cluster goes on stopping"):
        state = StateDirectory(name)
        with asked(state, Request("down")) as (_, end), step(f"stopping {name}"):
            if now:
                with asked(state, Request("down")):
                    pass
            if not end.wait(deadline):
                raise StartError(f"{name} has not stopped within {deadline:.0f} s; its logs are in {state.path}")
        out.print("stopped; nothing is left running")
