"""Bad input is one clear line on standard error and exit code 2, before anything is started."""

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvferry.cli import app
from kvferry.cluster import launch, supervisor

PAIR = ["--prefill", "pp=2", "--decode", "tp=1"]


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> None:
        pytest.fail("a process was started")

    monkeypatch.setattr(supervisor.Supervisor, "start", start)
    monkeypatch.setattr(launch, "start_instances", start)


def _assert_refused(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["verify", "--prefill", "tpp=2", "--decode", "tp=1"], "did you mean tp?"),
        (["verify", "--prefill", "tp=2", "--decode", "junk"], "not of the form key=value"),
        (["verify", "--prefill", "tp=5", "--decode", "tp=1"], "8 attention heads cannot be split over tp=5"),
        (["verify", "--prefill", "pp=9", "--decode", "tp=1"], "4 layers are too few for pp=9"),
        (["verify", *PAIR, "--model", "/nowhere"], "there is no model directory /nowhere"),
        (["verify", *PAIR, "--prompts", "/nowhere"], "the prompts in /nowhere cannot be read"),
        (["verify", *PAIR, "--dtype", "int3"], "--dtype int3 is not one of"),
        (["demo", "--prefill", "pp=two"], "pp=two is not a positive whole number"),
        (["demo", "--model", "/nowhere"], "there is no model directory /nowhere"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], said: str) -> None:
    _assert_refused(arguments, said)


@pytest.mark.parametrize("command", [["verify", *PAIR], ["demo"]])
def test_a_port_in_use_is_refused(command: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        _assert_refused([*command, "--port", str(port)], f"port {port} on 127.0.0.1 cannot be used")


def test_a_directory_that_is_no_model_is_refused(tmp_path: Path) -> None:
    _assert_refused(["verify", *PAIR, "--model", str(tmp_path)], "it has no config.json")


def test_without_a_command_the_commands_are_listed() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "verify" in result.stdout
    assert "demo" in result.stdout
    assert "plan" in result.stdout
