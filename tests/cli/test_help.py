"""The help of every command: an example in each, and nothing cut off or wider than a terminal of 80 columns."""

import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from kvferry.cli import app


def walk(group: Any, *name: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with its words, those of groups too."""
    for word, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from walk(command, *name, word)
        else:
            yield (*name, word), command


COMMANDS = dict(walk(typer.main.get_command(app)))


def _help(*command: str, columns: int = 80) -> Result:
    environment = {"COLUMNS": str(columns), "TERMINAL_WIDTH": str(columns)}
    return CliRunner().invoke(app, [*command, "--help"], env=environment, terminal_width=columns, prog_name="kvferry")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_an_example_that_the_command_takes(command: tuple[str, ...]) -> None:
    """It names options that there are; what it would do is not tried."""
    text = _help(*command).stdout
    described, _, examples = text.replace("Examples:", "Example:").partition("\n  Example:\n")
    lines = examples.splitlines()
    assert lines
    for line in lines:
        words = shlex.split(line.partition("  (")[0].strip() or line)
        assert words[: 1 + len(command)] == ["kvferry", *command]
        for word in words[: words.index("--")] if "--" in words else words:
            assert not word.startswith("--") or f"{word} " in described.partition("Options:")[2]


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", [(), *COMMANDS], ids=" ".join)
def test_help_is_complete_and_fits_its_terminal(command: tuple[str, ...], columns: int) -> None:
    text = _help(*command, columns=columns).stdout
    assert all(len(line) <= columns for line in text.splitlines())
    _, _, described = text.partition("\n\n")  # after the usage, which says with dots that something may be repeated
    assert described
    assert "…" not in described
    assert not [line for line in described.splitlines() if line.endswith("...")]
    assert "\x1b" not in text


def test_every_option_says_what_it_is() -> None:
    for name, command in COMMANDS.items():
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{name}: {parameter.name}"
