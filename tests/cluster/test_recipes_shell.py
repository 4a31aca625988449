"""A command printed for a shell is the command."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.cluster.recipes.shell import keys_command, shell_command

SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"


@pytest.mark.parametrize("awkward", ["plain", "two words", "it's", 'a "b" $HOME `x` \\', "--x", "{}", "a\nb", "*", ""])
def test_a_shell_runs_what_was_meant(awkward: str) -> None:
    inherited = {**os.environ, "TO_BE_REMOVED": "1", "SAME": "same"}
    wanted = {**os.environ, "SAME": "same", "AWKWARD": awkward}
    text = shell_command([sys.executable, "-c", SHOW, awkward, "--flag", awkward], wanted, inherited)
    done = subprocess.run(["sh", "-c", text], env=inherited, capture_output=True, text=True, check=True)
    arguments, environment = json.loads(done.stdout)
    assert arguments == [awkward, "--flag", awkward]
    assert environment["AWKWARD"] == awkward
    assert "TO_BE_REMOVED" not in environment
    assert "SAME=" not in text


def test_keys_are_made_fresh_and_for_their_user_alone(tmp_path: Path) -> None:
    files = [tmp_path / "a b" / "secret", tmp_path / "a b" / "key"]
    contents = set()
    for _ in range(2):
        subprocess.run(["sh", "-c", keys_command(files)], check=True)
        contents |= {file.read_text() for file in files}
    assert len(contents) == 4
    assert all(len(content) == 64 and set(content) <= set("0123456789abcdef") for content in contents)
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
