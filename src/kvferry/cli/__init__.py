"""The command line: one module per command."""

import typer

from kvferry.cli import bench, demo, doctor, down, gateway, logs, plan, scale, status, up, verify

app = typer.Typer(
    name="kvferry",
    help="Move KV caches between vLLM prefill and decode instances of any two parallel layouts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(epilog=up.EXAMPLE)(up.up)
app.command(epilog=status.EXAMPLE)(status.status)
app.command(epilog=logs.EXAMPLE)(logs.logs)
app.command(epilog=scale.EXAMPLE)(scale.scale)
app.command(epilog=down.EXAMPLE)(down.down)
app.command(epilog=verify.EXAMPLE)(verify.verify)
app.command(epilog=demo.EXAMPLE)(demo.demo)
app.command(epilog=gateway.EXAMPLE)(gateway.gateway)
app.command(epilog=doctor.EXAMPLE)(doctor.doctor)
app.command()(plan.plan)
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Entry point of the console script."""
    app()
