"""The command line: one module per command."""

import typer

from kvferry.cli.demo import demo
from kvferry.cli.gateway import EXAMPLE, gateway
from kvferry.cli.plan import plan
from kvferry.cli.verify import verify

app = typer.Typer(
    name="kvferry",
    help="Move KV caches between vLLM prefill and decode instances of any two parallel layouts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(verify)
app.command()(demo)
app.command(epilog=EXAMPLE)(gateway)
app.command()(plan)


def main() -> None:
    """Entry point of the console script."""
    app()
