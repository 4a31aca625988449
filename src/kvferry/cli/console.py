"""What all commands share: how progress and errors are shown, and the exit codes."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import typer
from rich.console import Console

from kvferry.errors import ClusterError, GatewayError, KVFerryError, PortInUseError, SettingsError, SpecError

DIFFERENT = 1
BAD_INPUT = 2
NOT_RUN = 3
INTERRUPTED = 130
WIDE = 200

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def examples(*commands: str) -> str:
    """The end of a command's help: examples of its use, each of them a line of its own."""
    return "\n  ".join(["\b\nExample:" if len(commands) == 1 else "\b\nExamples:", *commands])


def page() -> Console:
    """For what is as wide as the terminal; where nobody looks at it but a program, everything has its place."""
    return Console(highlight=False, width=None if out.is_terminal or "COLUMNS" in os.environ else WIDE)


@contextlib.contextmanager
def reported_errors() -> Iterator[None]:
    """Turn the project's exceptions into a line on standard error and an exit code."""
    try:
        yield
    except (SpecError, SettingsError, GatewayError, ClusterError, PortInUseError) as error:
        err.print(f"kvferry: {error}", markup=False)
        raise typer.Exit(BAD_INPUT) from error
    except KVFerryError as error:
        err.print(f"kvferry: {error}", markup=False)
        raise typer.Exit(NOT_RUN) from error
    except KeyboardInterrupt as error:
        err.print("kvferry: interrupted; everything it started is stopped")
        raise typer.Exit(INTERRUPTED) from error


@contextlib.contextmanager
def left_alone(what_goes_on: str = "") -> Iterator[None]:
    """For commands that only ask a running cluster: Ctrl-C ends the asking, and stops nothing there."""
    try:
        yield
    except KeyboardInterrupt as error:
        if what_goes_on:
            err.print(f"kvferry: interrupted; {what_goes_on}", markup=False)
        raise typer.Exit(INTERRUPTED) from error


@contextlib.contextmanager
def named_logs(directory: Path) -> Iterator[None]:
    """Say where the logs are when something goes wrong while they are written."""
    try:
        yield
    except KVFerryError:
        err.print(f"kvferry: logs are in {directory}", markup=False)
        raise


class Step:
    """One long step: a line that counts seconds while it runs, and stays when it is done."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.detail = ""
        self._start = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def __rich__(self) -> str:
        return f"{self.title} [dim]{self.elapsed_s:.0f} s  {self.detail}[/dim]"

    def say(self, detail: str) -> None:
        """Show what the step is doing now."""
        self.detail = detail


@contextlib.contextmanager
def step(title: str) -> Iterator[Step]:
    """Show a step's progress; where there is no terminal, one line when it starts and one when it is done."""
    running = Step(title)
    if not out.is_terminal:
        out.print(f"{title} ...")
    with out.status(running, spinner="dots", refresh_per_second=4):
        yield running
    out.print(f"[green]done[/green]  {title} [dim]({running.elapsed_s:.1f} s)[/dim]")


class Readiness:
    """Shows which of several processes are still awaited; a progress callback for the supervisor."""

    def __init__(self, shown: Step) -> None:
        self._step = shown
        self._seen: dict[str, float] = {}

    def __call__(self, name: str, elapsed_s: float) -> None:
        self._seen = {other: at for other, at in self._seen.items() if at == elapsed_s}
        self._seen[name] = elapsed_s
        self._step.say(f"waiting for {', '.join(self._seen)}")
