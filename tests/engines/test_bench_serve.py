"""``kvferry bench serve`` with real engines: the same text with KVFerry as from a plain engine, and really moved."""

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from kvferry.bench.serve.figures import rows
from kvferry.bench.serve.result import Outcome, Result
from kvferry.cli import app
from kvferry.cluster.tiny import tiny

pytestmark = [pytest.mark.engines, pytest.mark.heavy, pytest.mark.timeout(1200)]


def test_kvferry_and_a_plain_engine_are_measured(tmp_path: Path) -> None:
    path, page = tmp_path / "result.json", tmp_path / "report.html"
    arguments = ["--contender", "kvferry", "--contender", "plain", "--model", str(tiny("qwen2")), "--seed", "11"]
    arguments += ["--num-prompts", "6", "--random-input-len", "300", "--max-concurrency", "2", "--dtype", "float32"]
    arguments += ["--json", str(path), "--html", str(page), "--logs", str(tmp_path / "logs"), "--deadline", "500"]
    done = CliRunner().invoke(app, ["bench", "serve", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert done.exit_code == 0, done.output
    result = msgspec.json.decode(path.read_bytes(), type=Result)
    assert [turn.outcome for turn in result.turns] == [Outcome.MEASURED] * 2
    kvferry, plain = rows(result)
    assert (kvferry.completed, kvferry.failed, plain.completed, plain.failed) == (6, 0, 6, 0)
    assert kvferry.same == 1.0
    assert kvferry.moved is not None
    assert kvferry.moved >= 299 / 300
    for phase in ("claim", "read", "ack"):
        assert kvferry.legs[f"decode: {phase}"] > 0
    assert "<svg" in page.read_text()
