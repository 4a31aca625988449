"""Clusters of one machine are told apart by their state directories, and dead ones are seen to be dead."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.cluster.state import Record, StateDirectory, running_clusters, state_root
from kvferry.errors import ClusterError

HOLDER = """
import sys, time
from pathlib import Path
from kvferry.cluster.state import StateDirectory
state = StateDirectory("default", Path(sys.argv[1]))
state.acquire()
state.write_keys()
print("held", flush=True)
time.sleep(600)
"""


def test_a_name_is_used_by_one_at_a_time(tmp_path: Path) -> None:
    first, second = StateDirectory("default", tmp_path), StateDirectory("default", tmp_path)
    first.acquire()
    with pytest.raises(ClusterError, match="a cluster named default is running; `kvferry down` ends it"):
        second.acquire()
    StateDirectory("blue", tmp_path).acquire()
    first.release()
    second.acquire()


def test_what_a_killed_cluster_left_is_recognised_and_cleared(tmp_path: Path) -> None:
    state = StateDirectory("default", tmp_path)
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert state.running
        before = state.secret.read_text()
        os.kill(holder.pid, signal.SIGKILL)
    assert not state.running
    state.acquire()
    assert not state.secret.exists()
    state.write_keys()
    assert state.secret.read_text() != before


def test_keys_are_for_their_user_alone(tmp_path: Path) -> None:
    (tmp_path / "default").mkdir(mode=0o755)
    state = StateDirectory("default", tmp_path)
    state.acquire()
    state.write_keys()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (state.secret, state.admin_key)] == [0o600, 0o600]
    assert stat.S_IMODE(state.path.stat().st_mode) == 0o700
    assert len(state.secret.read_text().strip()) == 64
    assert state.secret.read_text() != state.admin_key.read_text()


def test_logs_stay_when_a_cluster_ends_and_keys_do_not(tmp_path: Path) -> None:
    state = StateDirectory("default", tmp_path)
    state.acquire()
    state.write_keys()
    state.logs.mkdir()
    (state.logs / "decode-0.log").write_text("said")
    state.release()
    assert (state.logs / "decode-0.log").read_text() == "said"
    assert not state.secret.exists()
    assert not state.admin_key.exists()


def test_only_running_clusters_are_listed_and_named_in_errors(tmp_path: Path) -> None:
    running, dead = StateDirectory("blue", tmp_path), StateDirectory("dead", tmp_path)
    dead.acquire()
    dead.release()
    with pytest.raises(ClusterError, match=r"no cluster named default is running \(none is running\)"):
        StateDirectory("default", tmp_path).require_running()
    running.acquire()
    assert [state.name for state in running_clusters(tmp_path)] == ["blue"]
    with pytest.raises(ClusterError, match=r"\(running: blue\)"):
        StateDirectory("default", tmp_path).require_running()


def test_a_record_says_what_is_held_and_a_broken_one_nothing(tmp_path: Path) -> None:
    state = StateDirectory("default", tmp_path)
    state.acquire()
    state.write_record(Record(1, (8080,), ("0",)))
    assert state.record() == Record(1, (8080,), ("0",))
    (state.path / "record.json").write_text("{")
    assert state.record() == Record(0)


def test_a_directory_that_cannot_be_used_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ClusterError, match="cannot be used: Not a directory"):
        StateDirectory("default", tmp_path / "file").acquire()


def test_the_root_is_where_the_environment_says() -> None:
    assert state_root({"KVFERRY_STATE": "/a", "XDG_STATE_HOME": "/b"}) == Path("/a")
    assert state_root({"XDG_STATE_HOME": "/b"}) == Path("/b/kvferry")
    assert state_root({}) == Path.home() / ".local/state/kvferry"
