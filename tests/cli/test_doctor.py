"""``kvferry doctor``: one line per finding, JSON for programs, exit codes, and one clear line for bad input."""

import json
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvferry.cli import app
from kvferry.cluster.doctor import link, local, pairs
from kvferry.cluster.doctor.fabric import Used
from kvferry.cluster.doctor.findings import Finding, ok, problem, warning
from kvferry.cluster.doctor.link import Report, Speed

DEADLINE_S = 60.0
GOOD = [ok("vllm", "0.32.0"), ok("plugin", "visible")]
WARNED = [*GOOD, warning("ports", "8000 is taken [by somebody]", "name another --port")]
BAD = [*WARNED, problem("torch", "2.1 does not fit", "pip install torch")]
REPORT = Report("h:1", 1, Speed(1.0, 2.0), Speed(3.0, 4.0), 5.0, 6.0, 0.1, (Used(1, "zero-copy", "cma/memory"),), None)


def _run(*arguments: str, columns: int = 100) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": str(columns), "NO_COLOR": "1"})


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """What this machine is said to be like."""
    lines: list[Finding] = []
    monkeypatch.setattr(local, "examine", lambda: lines)
    return lines


@pytest.mark.parametrize(("lines", "code"), [(GOOD, 0), (WARNED, 0), (BAD, 1)], ids=["good", "warned", "bad"])
def test_only_a_problem_makes_it_fail(found: list[Finding], lines: list[Finding], code: int) -> None:
    """Each line says how it is in a word, so that colours are not needed, and what to do."""
    found += lines
    result = _run()
    assert result.exit_code == code
    for line in lines:
        assert f"{line.level} " in result.stdout
        assert line.name in result.stdout
        assert line.text in result.stdout
        assert not line.fix or f"fix: {line.fix}" in result.stdout
    assert "\x1b" not in result.stdout


def test_json_is_complete_and_stable(found: list[Finding]) -> None:
    found += BAD
    result = _run("--json")
    assert result.exit_code == 1
    said = json.loads(result.stdout)
    assert list(said) == ["problems", "warnings", "findings", "link", "pairs"]
    assert (said["problems"], said["warnings"], said["link"], said["pairs"]) == (1, 1, None, None)
    assert said["findings"][2] == {
        "name": "ports",
        "level": "warning",
        "text": "8000 is taken [by somebody]",
        "fix": "name another --port",
    }
    assert _run("--json").stdout == result.stdout


def test_this_machine_is_examined_for_real() -> None:
    """Every check has its line, in one order, and none of them failed itself."""
    said = json.loads(_run("--json").stdout)
    names = [finding["name"] for finding in said["findings"]]
    assert names[:6] == ["vllm", "torch", "nixl", "abi", "plugin", "VLLM_PLUGINS"]
    assert {"ucx transfer", "GPU/NIC affinity", "locked memory", "shared memory", "ports", "advertised host"} <= {
        *names
    }
    assert not [finding for finding in said["findings"] if "could not be checked" in finding["text"]]


def test_a_link_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers in the JSON, lines on the screen; where it cannot be measured that is a problem."""
    asked: list[Any] = []

    def examine(*target: Any) -> tuple[list[Finding], Report]:
        asked.append(target)
        return link.findings(REPORT), REPORT

    monkeypatch.setattr(link, "examine", examine)
    assert "1 GB/s, 20% of memory copy here" in _run("10.0.0.7:4000", "--megabytes", "2").stdout
    said = json.loads(_run("[fd00::7]:4000", "--json").stdout)
    assert said["link"]["to_there"] == {"gigabytes_per_s": 3.0, "us_per_descriptor": 4.0}
    assert asked == [("10.0.0.7", 4000, 2 << 20), ("fd00::7", 4000, 64 << 20)]
    monkeypatch.setattr(link, "examine", lambda *_: ([problem("link", "nobody there", "start it")], None))
    assert _run("10.0.0.7:4000").exit_code == 1


def test_pairs_are_asked_of_the_urls_that_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask(instances: list[pairs.Instance]) -> list[pairs.Seen]:
        asked.extend(one.url for one in instances)
        return [pairs.Seen(one, None, ("same",)) for one in instances]

    monkeypatch.setattr(pairs, "ask", ask)
    urls = ["--prefill", "http://p:1", "--prefill", "http://p:2", "--decode", "http://d:1/"]
    result = _run("--cluster", *urls, "--json")
    assert result.exit_code == 0
    assert asked == ["http://p:1", "http://p:2", "http://d:1"]
    assert json.loads(result.stdout)["pairs"] == [
        {"prefill": f"prefill-{index}", "decode": "decode-0", "works": "can work", "connected": "not connected yet"}
        for index in range(2)
    ]
    assert "prefill-1 -> decode-0" in _run("--cluster", *urls).stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["junk"], "HOST:PORT"),
        (["host:99999"], "HOST:PORT"),
        (["host:1", "--cluster"], "two questions"),
        (["serve", "--decode", "http://d"], "two questions"),
        (["--port", "5"], "belong to `kvferry doctor serve`"),
        (["host:1", "--allow-public"], "belong to `kvferry doctor serve`"),
        (["serve", "--json"], "prints no JSON"),
        (["serve", "--host", "198.51.100.9"], "cannot be listened on"),
        (["--cluster", "--prefill", "nonsense"], "is not a URL"),
        (["--cluster", "--name", "nobody-has-this-name"], "no cluster named"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], said: str) -> None:
    result = _run(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert not result.stdout


def test_ctrl_c_ends_a_measurement_with_130() -> None:
    """Without a traceback, while the other side does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE_S)
        command = [sys.executable, "-m", "kvferry", "doctor", f"127.0.0.1:{listener.getsockname()[1]}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(DEADLINE_S)
                assert connection.recv(1 << 16)
                process.send_signal(signal.SIGINT)
                said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert said == ("", "")


def test_help_has_an_example_of_each_kind() -> None:
    text = " ".join(_run("--help").stdout.split())
    for example in ("Examples: kvferry doctor", "kvferry doctor serve --port 4000", "kvferry doctor --cluster"):
        assert example in text


def test_nothing_is_lost_in_a_narrow_terminal(found: list[Finding]) -> None:
    """Long texts are folded into their column."""
    found.append(problem("shared memory", "word " * 30 + "x" * 60, "do this " * 10))
    result = _run(columns=40)
    assert all(len(line) <= 40 for line in result.stdout.splitlines())
    assert result.stdout.count("word") == 30
    assert result.stdout.count("x") == 61  # that of `fix:` too
