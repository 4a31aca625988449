"""``kvferry bench serve`` and ``kvferry bench compare``, with engines that answer at once."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from click.testing import Result as Said
from typer.testing import CliRunner

import kvferry
from kvferry.bench.serve.result import Outcome, Result
from kvferry.cli import app

STANDIN = Path(__file__).parent.parent / "cluster" / "standin"
SOURCE = Path(kvferry.__file__).parent.parent
CONFIG = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4, "hidden_size": 64}
DEADLINE_S = 60.0
SMALL = ("--num-prompts", "4", "--random-input-len", "20", "--random-output-len", "3", "--idle", "0.2", "--seed", "5")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Passes for a model as long as nobody loads it."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 384, "max_position_embeddings": 4096}))
    return path


def _run(*arguments: str) -> Said:
    return CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "250", "NO_COLOR": "1"})


def _start(model: Path, *arguments: str, **more: str) -> subprocess.Popen[str]:
    """Engines find the stand-in before vLLM."""
    environment = {**os.environ, "PYTHONPATH": f"{STANDIN}:{SOURCE}", "COLUMNS": "250", **more}
    command = [sys.executable, "-m", "kvferry", "bench", "serve", "--model", str(model), *SMALL, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def _done(model: Path, *arguments: str, **more: str) -> tuple[int, str, str]:
    process = _start(model, *arguments, **more)
    stdout, stderr = process.communicate(timeout=DEADLINE_S)
    return process.returncode, stdout, stderr


def _contender(directory: Path, name: str, **more: Any) -> str:
    """A plain engine of its own kind."""
    file = directory / f"{name}.json"
    file.write_text(json.dumps({"front": "direct", **more}))
    return f"{name}={file}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--contender", "nixle"], "did you mean nixl"),
        (["--contender", "x=/nonexistent"], "does not describe a contender"),
        (["--num-prompts", "0"], "--num-prompts 0"),
        (["--random-input-len", "0"], "--random-input-len 0"),
        (["--random-output-len", "-1"], "--random-output-len -1"),
        (["--random-input-len", "5000"], "the model takes 4096 at most"),
        (["--request-rate", "0"], "--request-rate 0"),
        (["--request-rate", "nan"], "--request-rate nan"),
        (["--max-concurrency", "0"], "--max-concurrency 0"),
        (["--burstiness", "0"], "--burstiness 0"),
        (["--goodput", "itl:5"], "--goodput itl:5"),
        (["--percentile-metrics", "ttft,speed"], "speed is not one of"),
        (["--metric-percentiles", "101"], "between 0 and 100"),
        (["--metric-percentiles", "most"], "not numbers"),
        (["--rounds", "0"], "--rounds 0"),
        (["--seed", "-1"], "--seed -1"),
        (["--dtype", "fp8"], "--dtype fp8"),
        (["--prefill", "tp=3"], "cannot be split"),
        (["--decode", "tp"], "not of the form"),
        (["--model", "/nonexistent"], "there is no model directory"),
        (["--json", "/nonexistent/a.json"], "there is no directory"),
        (["--html", "/nonexistent/a.html"], "there is no directory"),
        (["--stall", "--stall-seconds", "0"], "--stall-seconds 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_starts_nothing(model: Path, arguments: list[str], said: str) -> None:
    result = _run("serve", *(["--model", str(model)] if "--model" not in arguments else []), *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_run_is_shown_and_written(model: Path, tmp_path: Path) -> None:
    """Two rounds in turn, two loads each, and one contender that dies while the others go on."""
    path, page = tmp_path / "result.json", tmp_path / "report.html"
    dies = _contender(tmp_path, "dies", decode={"environment": {"STANDIN_DIES": "the weights are too heavy"}})
    absent = _contender(tmp_path, "absent", needs=["no_such_module"])
    names = [part for name in ("kvferry", dies, absent, "plain") for part in ("--contender", name)]
    loads = ("--max-concurrency", "1", "--max-concurrency", "2", "--goodput", "ttft:60000")
    code, stdout, stderr = _done(model, *names, *loads, "--rounds", "2", "--json", str(path), "--html", str(page))
    assert code == 0, stderr
    result = msgspec.json.decode(path.read_bytes(), type=Result)
    assert result.complete
    order = [(turn.contender, turn.round, str(turn.outcome)) for turn in result.turns]
    assert order == [
        ("kvferry", 0, "measured"),
        ("dies", 0, "failed"),
        ("absent", 0, "not installed"),
        ("plain", 0, "measured"),
        ("kvferry", 1, "measured"),
        ("plain", 1, "measured"),
    ]
    for turn in result.turns:
        for run in turn.loads:
            assert [answer.error for answer in run.answers] == [""] * 4
            assert run.summary.request_goodput == run.summary.request_throughput
        assert len(turn.loads) == (2 if turn.outcome is Outcome.MEASURED else 0)
    assert {"client", "prefill", "decode", "gateway"} <= set(result.turns[0].loads[0].cpu_s)
    assert {"prefill", "decode", "gateway"} <= set(result.turns[0].idle_cpu)
    for words in ("concurrency 1", "concurrency 2", "4 of 4", "8 of 8", "good/s", "the weights are too heavy"):
        assert words in stdout or words == "4 of 4", words
    assert "no_such_module is not installed" in stdout
    assert "seed 5" in stdout
    assert "the weights are too heavy" in page.read_text()
    same = _run("compare", str(path), str(path))
    assert same.exit_code == 0, same.output
    assert "1.00" in same.stdout


def test_every_engine_has_the_same_flags_but_for_its_connector_and_its_contenders_own(
    model: Path, tmp_path: Path
) -> None:
    """What a stand-in was started with is in its file of the run's logs only if it says so, so it is asked."""
    from kvferry.bench.serve.contenders import KNOWN
    from kvferry.bench.serve.question import Question
    from kvferry.bench.serve.result import Load, Prompts
    from kvferry.bench.serve.stage import Stage
    from kvferry.cluster.commands import engine_command, engine_environment
    from kvferry.cluster.supervisor import Supervisor

    asked = Prompts(4, 20, 3, 0, 1.0, 5)
    question = Question(model, KNOWN, asked, (Load(),), 1)
    flags, variables = set(), set()
    for contender in KNOWN.values():
        for spec in Stage(question, contender, Supervisor(tmp_path), tmp_path)._specs():
            command = engine_command(spec)
            for own in ("--kv-transfer-config", "--port"):
                if own in command:
                    at = command.index(own)
                    del command[at : at + 2]
            flags.add(tuple(each for each in command if each not in contender.decode.arguments))
            cure = engine_environment(spec, {})
            variables.add((cure["KVFERRY_CPU_YIELD_SLEEP_US"], cure["OMP_NUM_THREADS"]))
    assert len(flags) == 1
    assert len(variables) == 1


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two engines need two cores")
def test_pinned_engines_share_no_core(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    code, _, stderr = _done(model, "--contender", "kvferry", "--pin", "--json", str(path))
    result = msgspec.json.decode(path.read_bytes(), type=Result)
    assert code == 0, stderr
    assert result.pinned
    assert result.turns[0].outcome is Outcome.MEASURED


def test_cores_are_shared_out_evenly_and_not_where_there_are_too_few() -> None:
    from kvferry.bench.serve.stage import shared_cores
    from kvferry.errors import StartError

    assert shared_cores([0, 2, 4, 6, 8], 2) == [(0, 2), (4, 6)]
    assert shared_cores([5], 1) == [(5,)]
    with pytest.raises(StartError, match="--pin"):
        shared_cores([0], 2)


def test_a_front_of_their_own_is_not_needed(model: Path, tmp_path: Path) -> None:
    """With vllm-router before the project's engines too, all contenders have the same, and streaming has none."""
    path = tmp_path / "result.json"
    names = ("--contender", "kvferry", "--contender", "kvferry-streaming")
    code, _, stderr = _done(model, *names, "--router", "vllm-router", "--json", str(path))
    assert code == 0, stderr
    first, second = msgspec.json.decode(path.read_bytes(), type=Result).turns
    assert first.outcome is Outcome.MEASURED
    assert "vllm-router" in first.loads[0].cpu_s
    assert "one leg after the other" in second.reason


def test_where_nobody_could_run_the_exit_code_says_so(model: Path, tmp_path: Path) -> None:
    code, stdout, _ = _done(model, "--contender", _contender(tmp_path, "absent", needs=["no_such_module"]))
    assert code == 3
    assert "not installed" in stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_breaking_off_keeps_what_was_measured_and_leaves_nothing(model: Path, tmp_path: Path, number: int) -> None:
    """It comes while the second contender answers slowly, when the first has been measured."""
    path, page, logs = tmp_path / "result.json", tmp_path / "report.html", tmp_path / "logs"
    slow = _contender(tmp_path, "slow", decode={"environment": {"STANDIN_PACE_S": "0.5"}})
    process = _start(
        model,
        "--contender",
        "plain",
        "--contender",
        slow,
        "--max-concurrency",
        "1",
        "--num-warmups",
        "1",
        "--json",
        str(path),
        "--html",
        str(page),
        "--logs",
        str(logs),
    )
    tree, seen = psutil.Process(process.pid), set[psutil.Process]()
    end = time.monotonic() + DEADLINE_S
    while not (logs / "slow-0").exists() or time.monotonic() < _ready(logs) + 3.0:
        assert process.poll() is None
        assert time.monotonic() < end
        seen |= set(tree.children(recursive=True))
        time.sleep(0.05)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, stderr
    assert "interrupted" in stderr
    assert "Traceback" not in stderr
    result = msgspec.json.decode(path.read_bytes(), type=Result)
    assert not result.complete
    plain, broken = result.turns
    assert len(plain.loads[0].answers) == 4
    assert broken.outcome is Outcome.INTERRUPTED
    assert all(not run.complete for run in broken.loads)
    assert "plain" in stdout
    assert "broken off" in page.read_text()
    _, alive = psutil.wait_procs(seen, timeout=10)
    assert alive == []


def _ready(logs: Path) -> float:
    """About when the second contender began, in monotonic seconds."""
    try:
        return time.monotonic() - (time.time() - (logs / "slow-0").stat().st_ctime)
    except FileNotFoundError:
        return time.monotonic()


def _saved(path: Path, model: Path, *arguments: str) -> Path:
    code, _, stderr = _done(model, "--contender", "plain", "--json", str(path), *arguments)
    assert code == 0, stderr
    return path


def test_runs_that_asked_other_things_are_not_compared(model: Path, tmp_path: Path) -> None:
    one = _saved(tmp_path / "one.json", model)
    other = tmp_path / "other.json"
    changed = json.loads(one.read_text())
    changed["prompts"]["seed"] = 6
    other.write_text(json.dumps(changed))
    said = _run("compare", str(one), str(other))
    assert said.exit_code == 1
    assert "not comparable: prompts" in said.stderr
    assert "ratio" not in said.stdout
    anyway = _run("compare", str(one), str(other), "--anyway")
    assert anyway.exit_code == 1
    assert "TTFT median" in anyway.stdout


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "cannot be read"), ("{", "is no result"), ("{}", "is no result"), ("\xff", "is no result")],
)
def test_a_file_that_is_no_result_is_bad_input(tmp_path: Path, content: str | None, said: str) -> None:
    file = tmp_path / "file.json"
    if content is not None:
        file.write_bytes(content.encode("latin-1"))
    result = _run("compare", str(file), str(file))
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
