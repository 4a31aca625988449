"""``kvferry render``: files that run a cluster, and one clear line for what cannot be."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from kvferry.cli import app

from ..cluster.clusters import SOURCE, manifest

DEADLINE_S = 60.0
JUST = shutil.which("just", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster of stand-in engines."""
    monkeypatch.setenv("KVFERRY_STATE", str(tmp_path / "state"))
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(manifest(tmp_path)))
    return path


def _render(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["render", *map(str, arguments)], env={"COLUMNS": "200"})


@pytest.mark.parametrize(("kind", "name"), [("just", "justfile"), ("systemd", "kvferry-default.target")])
def test_it_says_what_it_wrote_and_what_to_do_next(file: Path, tmp_path: Path, kind: str, name: str) -> None:
    result = _render(kind, file, "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    *written, following = result.stdout.splitlines()
    assert str(tmp_path / "out" / name) in written
    assert all(Path(path).is_file() for path in written)
    assert following.startswith("Next: ")
    assert (tmp_path / "out" / "secret.env").read_text().partition("=")[2].strip() not in result.output


def test_without_a_directory_one_is_made_here(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert _render("compose", file).exit_code == 0
    assert (tmp_path / "default-compose" / "compose.yaml").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["just", "/nowhere/cluster.yaml"], "/nowhere/cluster.yaml cannot be read"),
        (["just", "FILE", "--output", "/dev/null/out"], "/dev/null/out cannot be written: Not a directory"),
    ],
)
def test_bad_input_is_one_line(file: Path, arguments: Sequence[str], said: str) -> None:
    result = _render(*(str(file) if argument == "FILE" else argument for argument in arguments))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert said in result.stderr


def test_files_that_are_there_are_replaced_only_if_told_to(file: Path, tmp_path: Path) -> None:
    out = ["--output", str(tmp_path / "out")]
    assert _render("just", file, *out).exit_code == 0
    (tmp_path / "out" / "justfile").write_text("mine")
    refused = _render("just", file, *out)
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert (tmp_path / "out" / "justfile").read_text() == "mine"
    assert _render("just", file, *out, "--force").exit_code == 0


@pytest.mark.timeout(240)
@pytest.mark.skipif(JUST is None, reason="just is not installed")
def test_the_recipe_of_all_serves_and_leaves_nothing(file: Path, tmp_path: Path) -> None:
    assert _render("just", file, "--output", tmp_path / "out").exit_code == 0
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "KVFERRY_STATE": str(tmp_path / "state")}
    command = [str(JUST), "--justfile", str(tmp_path / "out" / "justfile")]
    with _running([*command, "all"], environment, tmp_path / "all.log"):
        subprocess.run([*command, "ready"], env=environment, timeout=DEADLINE_S, check=True)
        done = subprocess.run(
            [*command, "ask", "hi"], env=environment, timeout=DEADLINE_S, check=True, capture_output=True, text=True
        )
        assert '"choices"' in done.stdout
    _until(lambda: not [one for one in psutil.process_iter() if _is_of(one, tmp_path)], "ending everything")


@contextmanager
def _running(command: list[str], environment: dict[str, str], log: Path) -> Iterator[None]:
    with log.open("w") as output:
        shell = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield
    finally:
        os.killpg(shell.pid, signal.SIGTERM)  # as Ctrl-C does, to all in the shell
        shell.wait(DEADLINE_S)


def _is_of(process: psutil.Process, directory: Path) -> bool:
    try:
        return process.environ().get("KVFERRY_STATE") == str(directory / "state") and process.pid != os.getpid()
    except psutil.Error:
        return False


def _until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"{what} took more than {DEADLINE_S} s"
        time.sleep(0.05)
