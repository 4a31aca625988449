"""The command line: one module per command."""

import sys

import typer

from kvferry.cli import bench, demo, doctor, down, gateway, logs, plan, render, scale, status, up, verify

app = typer.Typer(
    name="kvferry",
    help="Move KV caches between vLLM prefill and decode instances of any two parallel layouts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut names and waste half of a terminal of 80 columns
)
COMMANDS = (
    (up.up, "Start a whole cluster and serve it under one URL."),
    (status.status, "Show what a running cluster does."),
    (logs.logs, "Show the logs of a cluster."),
    (scale.scale, "Add replicas to a running cluster, or drain some."),
    (down.down, "Drain and stop a running cluster."),
    (render.render, "Write a cluster as files for just, systemd or compose."),
    (plan.plan, "Say what a pair of layouts would do."),
    (verify.verify, "Compare a pair of layouts with a plain engine."),
    (demo.demo, "Answer one question with a small real model."),
    (gateway.gateway, "Serve instances under one URL."),
    (doctor.doctor, "Look for what is wrong."),
)
for command, summary in COMMANDS:
    app.command(epilog=sys.modules[command.__module__].EXAMPLE, short_help=summary)(command)
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Entry point of the console script."""
    app()
