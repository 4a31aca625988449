"""``kvferry bench transfer``: tables, a file, one clear line for bad input, and Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvferry.cli import app

DEADLINE_S = 60.0
SMALL = ("--layers", "2", "--kv-heads", "2", "--head-size", "16", "--tokens", "40", "--rounds", "1")


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "transfer", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pair", "tp=2"], "'tp=2' is not a pair of layouts"),
        (["--pair", "tp=2,dcp=2:tp=2"], "pairs with context parallelism (pcp, dcp) are not measured"),
        (["--pair", "tp=2:tp=x"], "tp=x is not a positive whole number"),
        (["--tokens", "0"], "not between 1 and"),
        (["--rounds", "0"], "--rounds 0"),
        (["--layers", "0"], "--layers 0"),
        (["--dtype", "fp8"], "--dtype fp8 is not one of"),
        (["--block-size", "0"], "blocks of 0 tokens"),
        (["--pair", "pp=9:tp=1"], "8 layers are too few"),
        (["--model", "/nonexistent"], "there is no model directory /nonexistent"),
        (["--tokens", "10000000"], "GB of memory"),
        (["--json", "/nonexistent/result.json"], "there is no directory /nonexistent"),
        (["--plot", "growth.svg"], "--measure growth"),
        (["--measure", "growth", "--plot", "growth.txt"], "--plot growth.txt must end in .svg or .png"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_starts_nothing(arguments: list[str], said: str) -> None:
    result = _run(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize("arguments", [["--transport", "rdma"], ["--blocks", "odd"], ["--measure", "all"]])
def test_an_unknown_choice_is_bad_input(arguments: list[str]) -> None:
    assert _run(*arguments).exit_code == 2


def test_pairs_are_shown_and_written(tmp_path: Path) -> None:
    """Every figure that is asked for has a column, and the file has every sample."""
    path = tmp_path / "result.json"
    result = _run("--pair", "tp=1:tp=2", "--pair", "tp=1:tp=1", *SMALL, "--transport", "tcp", "--json", str(path))
    assert result.exit_code == 0, result.output
    for word in ("tp1 -> tp2", "tp1 -> tp1", "GB/s", "ceiling", "copy", "ratio", "descr.", "gap ms", "load average"):
        assert word in result.stdout, word
    said = json.loads(path.read_text())
    assert said["complete"]
    assert said["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert said["pairs"]["transport"] == "tcp"
    assert [row["pair"] for row in said["pairs"]["rows"]] == ["tp1 -> tp2", "tp1 -> tp1"]
    assert len(said["pairs"]["samples"]) == sum(row["samples"] for row in said["pairs"]["rows"])
    assert said["growth"] is None


def test_the_shape_comes_from_a_model(tmp_path: Path) -> None:
    """A latent cache has one head, which every rank holds."""
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "kv_lora_rank": 32}
    (tmp_path / "config.json").write_text(json.dumps({**config, "qk_rope_head_dim": 8}))
    result = _run("--model", str(tmp_path), "--pair", "tp=1:tp=1", "--tokens", "40", "--rounds", "1")
    assert result.exit_code == 0, result.output
    assert "160 bytes per token" in result.stdout


def test_growth_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "growth.svg"
    result = _run("--measure", "growth", "--layers", "2", "--kv-heads", "4", "--plot", str(path))
    assert result.exit_code == 0, result.output
    for word in ("blocks moved", "blocks in the cache", "known producers"):
        assert word in result.stdout
    assert path.read_text().startswith("<?xml")


def test_acknowledgements_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvferry.cli import bench

    monkeypatch.setattr(bench, "ACKS_FOR_S", 0.2)
    result = _run("--measure", "acks", "--rounds", "1")
    assert result.exit_code == 0, result.output
    assert "of a core" in result.stdout


def _start(arguments: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kvferry", "bench", "transfer", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_ctrl_c_keeps_what_was_measured_and_leaves_nothing(tmp_path: Path) -> None:
    """The second round's processes are there when it comes, and gone afterwards."""
    path = tmp_path / "result.json"
    process = _start(["--pair", "tp=1:tp=1", *SMALL[:-1], "1000", "--json", str(path)])
    tree = psutil.Process(process.pid)
    seen: set[psutil.Process] = set()
    # One round has three processes, so a fourth belongs to the second, when the first has been measured.
    while len(seen) < 4:
        assert process.poll() is None
        seen |= set(tree.children())
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, stderr
    assert "interrupted" in stderr
    assert "Traceback" not in stderr
    assert "tp1 -> tp1" in stdout
    said = json.loads(path.read_text())
    assert not said["complete"]
    assert len(said["pairs"]["samples"]) >= 1
    psutil.wait_procs(seen, timeout=10)
    assert not [one for one in seen if one.is_running()]


def test_processes_end_with_the_command_that_started_them() -> None:
    """Also if that is killed and can do nothing about it."""
    process = _start(["--pair", "tp=1:tp=1", *SMALL[:-1], "1000"])
    tree = psutil.Process(process.pid)
    while len(children := tree.children()) < 3:
        assert process.poll() is None
    process.kill()
    process.communicate(timeout=DEADLINE_S)
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []
