"""``kvferry scale``: more or fewer replicas in a running cluster."""

from collections.abc import Sequence
from typing import Annotated

import typer

from kvferry.cli.console import examples, left_alone, out, reported_errors, step
from kvferry.cli.status import NAME_HELP
from kvferry.cluster.manifest import DEFAULT_NAME, Role
from kvferry.cluster.state import StateDirectory
from kvferry.errors import SpecError

EXAMPLE = examples("kvferry scale prefill=3 decode=2")


def scale(
    wanted: Annotated[list[str], typer.Argument(metavar="prefill=N decode=N", help="Replicas of one role or of both.")],
    name: Annotated[str, typer.Option(help=NAME_HELP)] = DEFAULT_NAME,
) -> None:
    """Add replicas, or drain some, while requests are served; a request under way is not failed for it."""
    from kvferry.cluster.control import Request, asked

    with reported_errors(), left_alone("the cluster goes on with it, see kvferry status"):
        numbers = replicas(wanted)
        request = Request("scale", numbers.get(Role.PREFILL), numbers.get(Role.DECODE))
        state = StateDirectory(name)
        state.require_running()
        with step(f"scaling {name} to {', '.join(wanted)}"), asked(state, request, None) as (result, _):
            pass
        out.print(f"{name} has {result}", markup=False)


def replicas(wanted: Sequence[str]) -> dict[Role, int]:
    """Raises ``SpecError`` for what is no ``role=number``, and for a role that is named twice."""
    numbers: dict[Role, int] = {}
    for text in wanted:
        role, equals, number = text.partition("=")
        if not equals or role not in list(Role) or not (number.isascii() and number.isdigit()):
            raise SpecError(f"{text!r} is not of the form prefill=3 or decode=2")
        if Role(role) in numbers:
            raise SpecError(f"{role} is given twice")
        numbers[Role(role)] = int(number[:9])
    return numbers
