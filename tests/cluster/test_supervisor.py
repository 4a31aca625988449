"""Processes are started, awaited and stopped, and nothing of them outlives their supervisor."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from kvferry.cluster.ports import free_ports, require_free
from kvferry.cluster.supervisor import PeakMemory, Supervisor
from kvferry.errors import PortInUseError, StartError

DEADLINE_S = 20.0
SERVER = """
import http.server, sys
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""
# A process with a child in a session of its own, and an orphan: the hard cases of an engine's process tree. All of
# them ignore SIGTERM. Writes their ids to the file it is given.
TREE = """
import json, os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleeper = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
other_session = subprocess.Popen([sys.executable, "-c", sleeper], start_new_session=True)
# The orphan must not keep the pipe that its id comes through.
middle = (
    "import subprocess, sys\\n"
    "command = [sys.executable, '-c', sys.argv[1]]\\n"
    "orphan = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)\\n"
    "print(orphan.pid)"
)
orphan = int(subprocess.run([sys.executable, "-c", middle, sleeper], stdout=subprocess.PIPE, check=True).stdout)
with open(sys.argv[1] + ".part", "w") as file:
    json.dump([os.getpid(), other_session.pid, orphan], file)
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(600)
"""
# Whoever runs the tests may have had signals ignored (nohup, a shell's background job), which children inherit.
OWNER = """
import os, signal, sys, time
from pathlib import Path
from kvferry.cluster.supervisor import Supervisor
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
with Supervisor(Path(sys.argv[1])) as supervisor:
    supervisor.start("tree", [sys.executable, "-c", sys.argv[3], sys.argv[2]], os.environ, grace_s=0.2)
    time.sleep(600)
"""


def _until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"{what} took more than {DEADLINE_S} s"
        time.sleep(0.02)


def _tree(path: Path) -> list[int]:
    _until(path.exists, "starting the tree")
    return json.loads(path.read_text())


def _gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _assert_all_gone(pids: list[int]) -> None:
    _until(lambda: all(map(_gone, pids)), "ending the tree")


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    with Supervisor(tmp_path / "logs") as supervisor:
        yield supervisor


def _start(supervisor: Supervisor, code: str, *arguments: str, grace_s: float = 0.2) -> None:
    supervisor.start("child", [sys.executable, "-c", code, *arguments], os.environ, grace_s)


def test_a_server_is_ready_when_it_answers(supervisor: Supervisor) -> None:
    [port] = free_ports(1)
    seen: list[str] = []
    _start(supervisor, SERVER, str(port))
    supervisor.wait_ready({"child": f"http://127.0.0.1:{port}/health"}, DEADLINE_S, lambda name, _: seen.append(name))
    assert set(seen) == {"child"}


def test_a_process_that_dies_first_is_reported_with_its_cause(supervisor: Supervisor) -> None:
    _start(supervisor, "print('loading'); raise ValueError('heads cannot be split')")
    with pytest.raises(StartError) as caught:
        supervisor.wait_ready({"child": "http://127.0.0.1:1/health"}, DEADLINE_S)
    text = str(caught.value)
    assert text.startswith("child ended with exit code 1: ValueError: heads cannot be split")
    assert "| loading" in text
    assert "child.log" in text


def test_a_process_that_never_answers_is_given_up_at_the_deadline(supervisor: Supervisor) -> None:
    [port] = free_ports(1)
    _start(supervisor, "import time; time.sleep(600)")
    with pytest.raises(StartError, match="did not become ready within 0 s"):
        supervisor.wait_ready({"child": f"http://127.0.0.1:{port}/health"}, 0.3)


def test_a_command_that_does_not_exist_is_reported(supervisor: Supervisor) -> None:
    supervisor.start("child", ["/nowhere/engine"], os.environ)
    with pytest.raises(StartError, match="cannot run /nowhere/engine"):
        supervisor.wait_ready({"child": "http://127.0.0.1:1/health"}, DEADLINE_S)


def test_a_name_is_used_once(supervisor: Supervisor) -> None:
    _start(supervisor, "import time; time.sleep(600)")
    with pytest.raises(StartError, match="named child already"):
        _start(supervisor, "")


def test_stopping_ends_sessions_and_orphans_that_ignore_sigterm(supervisor: Supervisor, tmp_path: Path) -> None:
    _start(supervisor, TREE, str(tmp_path / "pids"))
    pids = _tree(tmp_path / "pids")
    supervisor.stop("child")
    assert all(map(_gone, pids))


def test_what_a_dead_process_leaves_is_ended_at_once(supervisor: Supervisor, tmp_path: Path) -> None:
    _start(supervisor, TREE, str(tmp_path / "pids"))
    pids = _tree(tmp_path / "pids")
    os.kill(pids[0], signal.SIGKILL)
    _assert_all_gone(pids)


def test_an_orderly_process_gets_its_grace_period(supervisor: Supervisor, tmp_path: Path) -> None:
    goodbye, ready = tmp_path / "goodbye", tmp_path / "ready"
    code = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), pathlib.Path(sys.argv[1]).touch(), sys.exit(0)))\n"
        "pathlib.Path(sys.argv[2]).touch()\n"
        "time.sleep(600)"
    )
    _start(supervisor, code, str(goodbye), str(ready), grace_s=10.0)
    _until(ready.exists, "starting")
    supervisor.stop("child")
    assert goodbye.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_nothing_outlives_a_supervisor_that_is_ended_by(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path / "logs"), str(tmp_path / "pids"), TREE]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as owner:
        try:
            pids = _tree(tmp_path / "pids")
            guard = psutil.Process(pids[0]).ppid()
            owner.send_signal(number)
            owner.wait(DEADLINE_S)
        finally:
            owner.kill()
    _assert_all_gone([*pids, guard])


def test_memory_of_the_whole_tree_is_measured(supervisor: Supervisor, tmp_path: Path) -> None:
    _start(supervisor, TREE, str(tmp_path / "pids"))
    _tree(tmp_path / "pids")
    assert supervisor.memory_bytes() > 10 << 20
    with PeakMemory(supervisor, interval_s=0.01) as peak:
        _until(lambda: peak.bytes > 10 << 20, "sampling")


def test_free_ports_are_different_and_free() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5
    for port in ports:
        require_free(port)


def test_a_port_in_use_is_a_clear_error() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"port {port} .* address already in use"):
            require_free(port)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_number_that_is_no_port_is_a_clear_error(port: int) -> None:
    with pytest.raises(PortInUseError, match="cannot be used"):
        require_free(port)
