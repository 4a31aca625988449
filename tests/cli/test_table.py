"""A cluster as a table of any width, and as lines where there is no terminal to draw on."""

import io

import pytest
from rich.console import Console

from kvferry.cli import table as shown
from kvferry.cluster.control import ClusterStatus, InstanceStatus

READY = InstanceStatus(
    "prefill-0", "prefill", "tp=2,pp=2,dp=1", ("0", "1", "2", "3"), "http://h:1", "/s/logs/prefill-0.log", "ready", 5.0
)
BROKEN = InstanceStatus(
    "decode-0",
    "decode",
    "tp=1,pp=1,dp=1",
    ("4",),
    "http://h:2",
    "/s/logs/decode-0.log",
    "restarting",
    2.0,
    detail="decode-0 ended with exit code 1: [weird] markup",
    restarts=2,
    running=3,
    waiting=1,
    kv_usage=0.25,
)
STATUS = ClusterStatus("default", "serving", "http://h:8080", "m", 7, "/s/logs", (READY, BROKEN))


@pytest.mark.parametrize("width", [30, 60, 80, 120, 200])
def test_a_table_fits_any_width_and_always_says_what_matters(width: int) -> None:
    file = io.StringIO()
    Console(file=file, width=width).print(shown.table(STATUS, width))
    text = file.getvalue()
    assert all(len(line) <= width for line in text.splitlines())
    flat = "".join(text.split())
    for word in ("default:serving", "http://h:8080"):
        assert word in flat


def test_a_wide_table_says_everything() -> None:
    file = io.StringIO()
    Console(file=file, width=200).print(shown.table(STATUS, 200))
    words = (
        "tp=2,pp=2",
        "0,1,2,3",
        "restarted 2 times",
        "[weird] markup",
        "decode-0.log",
    )
    for word in words:
        assert word in file.getvalue()
    [row] = [line for line in file.getvalue().splitlines() if line.startswith("decode-0  ")]
    assert row.split() == ["decode-0", "tp=1", "4", "restarting", "2", "s", "3", "1", "25%", "decode-0.log"]


def test_lines_are_printed_for_what_changes_only(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown.Lines()
    lines.show(STATUS)
    lines.show(STATUS)
    lines.show(ClusterStatus("default", "serving", "http://h:8080", "m", 7, "/s/logs", (READY,)))
    assert capsys.readouterr().out.splitlines() == [
        "prefill-0: ready",
        "decode-0: restarting, restarted 2 times: decode-0 ended with exit code 1: [weird] markup",
        "decode-0: gone",
    ]


@pytest.mark.parametrize(
    ("terminal", "environment", "kind"),
    [
        (True, {"TERM": "xterm"}, shown.LiveTable),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, shown.Lines),
        (True, {"TERM": "dumb"}, shown.Lines),
        (False, {"TERM": "xterm"}, shown.Lines),
    ],
)
def test_a_live_table_needs_a_terminal_that_can_be_drawn_on(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, environment: dict[str, str], kind: type
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(shown, "out", Console(force_terminal=terminal, _environ=environment))
    assert type(shown.view()) is kind


def test_a_live_table_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    with shown.LiveTable() as live:
        live._console.file = file
        live.show(STATUS)
    assert "prefill-0" in file.getvalue()
