"""``kvferry up`` and its companions from the command line: real processes, stand-in engines."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from typer.testing import CliRunner

from kvferry.cli import app
from kvferry.cluster import supervisor
from kvferry.cluster.state import StateDirectory

from ..cluster.clusters import SOURCE, manifest, model

DEADLINE_S = 60.0

pytestmark = pytest.mark.timeout(240)


class Place:
    """A directory with a model, a cluster.yaml and the state of its clusters, and the command in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = model(directory)
        self.environment = {
            **os.environ,
            "KVFERRY_STATE": str(directory / "state"),
            "PYTHONPATH": str(SOURCE),
            "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
            "COLUMNS": "200",
        }

    def file(self, **more: Any) -> str:
        path = self.directory / "cluster.yaml"
        path.write_text(yaml.safe_dump(manifest(self.directory, **more)))
        return str(path)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvferry", *arguments]
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )

    @contextmanager
    def up(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-m", "kvferry", "up", *arguments]
        with subprocess.Popen(
            [sys.executable, "-c", AS_FROM_A_SHELL, *command],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def state(self, name: str = "default") -> StateDirectory:
        return StateDirectory(name, self.directory / "state")

    def processes(self) -> list[psutil.Process]:
        """Whatever runs in this place, whoever its parent is."""
        return [process for process in psutil.process_iter() if self._is_here(process)]

    def _is_here(self, process: psutil.Process) -> bool:
        try:
            here = process.environ().get("KVFERRY_STATE") == self.environment["KVFERRY_STATE"]
            return here and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def assert_nothing_is_left(self) -> None:
        _until(lambda: not self.processes(), "ending all processes")


# Whoever runs the tests may have had signals ignored, which children inherit.
AS_FROM_A_SHELL = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    for process in place.processes():
        process.kill()


def _until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"{what} took more than {DEADLINE_S} s"
        time.sleep(0.02)


def _url(up: subprocess.Popen[str]) -> str:
    """Where it serves, once it says so."""
    assert up.stdout is not None
    said = ""
    for line in up.stdout:
        said += line
        if found := re.search(r"serving m on (http\S+)/v1", line):
            return found[1]
    pytest.fail(f"it ended: {said}")


def _ask(url: str, max_tokens: int = 3) -> httpx.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": max_tokens}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=DEADLINE_S, trust_env=False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_it_serves_and_a_signal_ends_it_and_everything(place: Place, number: signal.Signals) -> None:
    with place.up(place.file()) as up:
        assert _ask(_url(up)).status_code == 200
        up.send_signal(number)
        rest, _ = up.communicate(timeout=DEADLINE_S)
        assert up.returncode == 0
        assert rest.endswith("stopped; nothing is left running\n")
        assert "prefill-0: draining" in rest
    assert place.processes() == []
    assert not place.state().running


def test_a_killed_one_leaves_nothing_and_its_name_can_be_used_again(place: Place) -> None:
    with place.up(place.file()) as up:
        _url(up)
        up.kill()
        up.wait(DEADLINE_S)
        place.assert_nothing_is_left()
    assert place.run("status").returncode == 2
    with place.up(place.file()) as again:
        assert _ask(_url(again)).status_code == 200
        again.terminate()
        again.wait(DEADLINE_S)


def test_one_that_is_interrupted_while_it_starts_leaves_nothing(place: Place) -> None:
    with place.up(place.file()) as up:
        _until(place.state().socket.exists, "starting")
        up.send_signal(signal.SIGINT)
        said, _ = up.communicate(timeout=DEADLINE_S)
        assert up.returncode == 130, said
        assert "interrupted; everything it started is stopped" in said
    assert place.processes() == []


def test_detached_it_is_seen_scaled_read_and_ended_by_other_commands(place: Place) -> None:
    file = place.file(decode={"layout": "dp=2"})
    begun = place.run("up", file, "--detach")
    assert begun.returncode == 0, begun.stdout + begun.stderr
    assert "see kvferry status, kvferry logs, kvferry down" in begun.stdout
    status = json.loads(place.run("status", "--json").stdout)
    assert [one["name"] for one in status["instances"]] == ["prefill-0", "decode-0", "gateway"]
    assert _ask(status["url"]).status_code == 200
    scaled = place.run("scale", "decode=2")
    assert (scaled.returncode, scaled.stdout.splitlines()[-1]) == (0, "default has prefill=1, decode=2")
    table = place.run("status").stdout
    assert "decode-1" in table
    assert "dp=2" in table
    assert "serving on http" in place.run("logs", "gateway").stdout
    refused = place.run("up", file)
    assert refused.returncode == 2
    assert refused.stderr.startswith("kvferry: a cluster named default is running; `kvferry down` ends it")
    down = place.run("down")
    assert (down.returncode, down.stdout.splitlines()[-1]) == (0, "stopped; nothing is left running")
    assert place.processes() == []
    assert "up | decode-1: gone" not in place.run("logs").stdout
    assert "decode-1: ready" in place.run("logs", "up").stdout


def test_two_clusters_of_one_machine_do_not_meet(place: Place) -> None:
    file = place.file()
    for name in ("blue", "green"):
        assert place.run("up", file, "--detach", "--name", name).returncode == 0
    status = [json.loads(place.run("status", "--json", "--name", name).stdout) for name in ("blue", "green")]
    urls = [one["url"] for cluster in status for one in cluster["instances"]]
    assert len(set(urls)) == len(urls) == 6
    for cluster in status:
        assert _ask(cluster["url"]).status_code == 200
    assert "(running: blue, green)" in place.run("status").stderr
    assert place.run("down", "--name", "blue").returncode == 0
    assert _ask(status[1]["url"]).status_code == 200
    assert place.run("down", "--name", "green").returncode == 0
    assert place.processes() == []


@pytest.mark.parametrize("options", [[], ["--detach"]])
def test_an_instance_that_dies_during_start_is_shown_with_its_last_lines(place: Place, options: list[str]) -> None:
    dying = {"decode-0": {"environment": {"STANDIN_DIES": "no room for the weights"}}}
    done = place.run("up", place.file(instances=dying), *options)
    assert done.returncode == 3
    assert "kvferry: decode-0 ended with exit code 1: ValueError: no room for the weights" in done.stderr
    assert "  | loading the weights" in done.stderr
    assert f"logs are in {place.state().logs}" in done.stderr
    place.assert_nothing_is_left()


def test_logs_are_followed_until_the_cluster_ends(place: Place) -> None:
    with place.up(place.file()) as up:
        url = _url(up)
        command = [sys.executable, "-m", "kvferry", "logs", "gateway", "--follow"]
        with subprocess.Popen(command, env=place.environment, stdout=subprocess.PIPE, text=True) as logs:
            assert logs.stdout is not None
            assert logs.stdout.readline().startswith("gateway | serving on")
            assert _ask(url).status_code == 200
            assert any("status=200" in line for line in logs.stdout)
            up.terminate()
            assert logs.wait(DEADLINE_S) == 0


def test_a_detached_start_that_is_interrupted_leaves_nothing(place: Place) -> None:
    with place.up(place.file(), "--detach") as up:
        _until(place.state().socket.exists, "starting")
        up.send_signal(signal.SIGINT)
        said, _ = up.communicate(timeout=DEADLINE_S)
        assert up.returncode == 130, said
    assert place.processes() == []


@pytest.mark.skipif(shutil.which("vllm-router", path=Path(sys.executable).parent) is None, reason="no vllm-router")
def test_vllm_router_serves_instead_and_cannot_be_scaled_behind(place: Place) -> None:
    with place.up(place.file(), "--router", "vllm-router") as up:
        assert _ask(_url(up)).status_code == 200
        refused = place.run("scale", "decode=2")
        assert refused.returncode == 2
        assert "vllm-router can neither add nor drain instances" in refused.stderr
        up.terminate()
        assert up.wait(DEADLINE_S) == 0
    assert place.processes() == []


def test_who_asks_may_be_interrupted_and_stops_nothing(place: Place) -> None:
    with place.up(place.file(environment={"STANDIN_PACE_S": "0.2"})) as up:
        url = _url(up)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(_ask, url, 30)
            command = [sys.executable, "-m", "kvferry", "down"]
            with subprocess.Popen(
                [sys.executable, "-c", AS_FROM_A_SHELL, *command],
                env=place.environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            ) as down:
                assert down.stdout is not None
                assert down.stdout.readline() == "stopping default ...\n"
                down.send_signal(signal.SIGINT)
                _, said = down.communicate(timeout=DEADLINE_S)
                assert (down.returncode, said) == (130, "kvferry: interrupted; the cluster goes on stopping\n")
            assert answer.result(DEADLINE_S).status_code == 200
        assert up.wait(DEADLINE_S) == 0


def test_the_commands_of_a_dry_run_serve_when_run_in_shells(place: Place) -> None:
    file = place.file(prefill={"layout": "pp=2"})
    done = place.run("up", file, "--dry-run", "--port", str(_free_port()), "--", "--seed", "5")
    assert done.returncode == 0, done.stderr
    _, keys, *commands = re.split(r"^# .*\n", done.stdout, flags=re.MULTILINE)[1:]
    assert not place.state().path.exists()
    assert len(commands) == 3
    assert "--seed" in commands[0]
    subprocess.run(["bash", "-c", keys], check=True, env=place.environment)
    shells = [_shell(command, place) for command in commands]
    try:
        url = f"http://127.0.0.1:{shlex.split(commands[2])[shlex.split(commands[2]).index('--port') + 1]}"
        _until(lambda: _answers(f"{url}/ready"), "serving")
        assert _ask(url).status_code == 200
    finally:
        for shell in shells:
            os.killpg(shell.pid, signal.SIGTERM)
            shell.wait(DEADLINE_S)
    place.assert_nothing_is_left()


def _shell(command: str, place: Place) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        ["bash", "-c", command], env=place.environment, start_new_session=True, stdout=subprocess.DEVNULL
    )


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


# Bad input: one clear line and exit code 2, before anything is started.


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Place:
    def start(*_: object, **__: object) -> None:
        pytest.fail("a process was started")

    monkeypatch.setattr(supervisor.Supervisor, "start", start)
    monkeypatch.setenv("KVFERRY_STATE", str(tmp_path / "state"))
    return Place(tmp_path)


def _refused(arguments: Sequence[str]) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["MODEL", "--prefill", "tpp=2"], "prefill.layout: unknown key 'tpp' in 'tpp=2'"),
        (["MODEL", "--prefill", "tp=5"], "prefill: tp=5,pp=1,dp=1 does not fit the model: 8 attention heads"),
        (["MODEL", "--decode", "pp=9"], "4 layers are too few for pp=9"),
        (["/nowhere"], "there is no model directory /nowhere"),
        (["org/nowhere"], "hf download org/nowhere"),
        (["/nowhere/cluster.yaml"], "/nowhere/cluster.yaml cannot be read"),
        ([], "a model or a cluster.yaml is needed"),
        (["MODEL", "--prefill-replicas", "0"], "prefill.replicas: Expected `int` >= 1"),
        (["MODEL", "--devices", "99"], "devices: 99 are not among the cores"),
        (["MODEL", "--name", "a/b"], "name: Expected `str` matching"),
        (["MODEL", "--secret-file", "/nowhere"], "secret_file /nowhere cannot be read"),
        (["MODEL", "--prefill-arg", "--port 1"], "--prefill-arg: --port is set by the cluster"),
        (["MODEL", "--prefill-arg", "'--a"], "--prefill-arg: No closing quotation"),
        (["MODEL", "--", "seed", "1"], "after --: 'seed' is not a flag of vLLM"),
        (["MODEL", "--demo"], "--demo brings its own model"),
        (["MODEL", "--dry-run", "--prefill", "tp=5"], "does not fit the model"),
    ],
)
def test_bad_input_is_refused(nothing_starts: Place, arguments: list[str], said: str) -> None:
    chosen = [str(nothing_starts.model) if argument == "MODEL" else argument for argument in arguments]
    assert said in _refused(["up", *chosen])


def test_an_unknown_key_is_refused_with_the_nearest_known_one(nothing_starts: Place) -> None:
    text = _refused(["up", nothing_starts.file(prefil={"layout": "pp=2"})])
    assert "cluster.yaml: unknown key 'prefil': did you mean 'prefill'?" in text


def test_too_few_gpus_are_refused(nothing_starts: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.cluster.machine.cpu_build_installed", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    text = _refused(["up", str(nothing_starts.model), "--prefill", "tp=2"])
    assert "3 GPUs are needed (prefill-0 2, decode-0 1), but 2 of 2 are free" in text


def test_a_port_in_use_is_refused(nothing_starts: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        text = _refused(["up", str(nothing_starts.model), "--port", str(port)])
    assert f"port {port} on 127.0.0.1 cannot be used" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["status"], "no cluster named default is running (none is running)"),
        (["down", "--name", "blue"], "no cluster named blue is running"),
        (["scale", "decode=2"], "no cluster named default is running"),
        (["scale", "decod=2"], "'decod=2' is not of the form prefill=3 or decode=2"),
        (["scale", "decode=2", "decode=3"], "decode is given twice"),
        (["logs"], "there are no logs of a cluster named default"),
    ],
)
def test_what_no_running_cluster_answers_is_refused(nothing_starts: Place, arguments: list[str], said: str) -> None:
    assert said in _refused(arguments)


def test_options_win_over_the_file_and_flags_reach_their_role(nothing_starts: Place) -> None:
    file = nothing_starts.file(port=_free_port(), prefill={"layout": "pp=2", "vllm": {"seed": 1}})
    options = ["--prefill", "pp=4", "--decode-replicas", "2", "--prefill-arg", "--seed 2", "--decode-arg=--seed 3"]
    done = CliRunner().invoke(app, ["up", file, "--dry-run", *options, "--", "--block-size", "64"])
    assert done.exit_code == 0, done.output
    blocks = re.split(r"^# ", done.stdout, flags=re.MULTILINE)
    engines = {block.partition(":")[0]: block for block in blocks if block.startswith(("prefill", "decode"))}
    assert list(engines) == ["prefill-0", "decode-0", "decode-1"]
    assert "--pipeline-parallel-size 4" in engines["prefill-0"]
    assert "--seed 2" in engines["prefill-0"]
    assert all("--seed 3" in engines[name] for name in ("decode-0", "decode-1"))
    assert all("--block-size 64" in block for block in engines.values())


def test_context_parallelism_is_part_of_a_layout(nothing_starts: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an option and in a file, and nowhere else: vLLM's own flags would change how many GPUs are needed."""
    monkeypatch.setattr("kvferry.cluster.machine.cpu_build_installed", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(12))))
    file = nothing_starts.file(port=_free_port(), prefill={"layout": {"tp": 8, "dcp": 2, "interleave": 16}})
    done = CliRunner().invoke(app, ["up", file, "--dry-run", "--decode", "tp=2,pcp=2"])
    assert done.exit_code == 0, done.output
    prefill, decode = (block for block in re.split(r"^# ", done.stdout, flags=re.MULTILINE) if "-0: " in block)
    assert "--decode-context-parallel-size 2" in prefill
    assert "--cp-kv-cache-interleave-size 16" in prefill
    assert "--prefill-context-parallel-size 2" in decode
    assert "CUDA_VISIBLE_DEVICES=8,9,10,11" in decode
    assert "give it as the layout" in _refused(["up", file, "--dry-run", "--", "-dcp", "2"])
    assert "did you mean dcp?" in _refused(["up", file, "--dry-run", "--prefill", "tp=4,decode-context-parallel=2"])
    assert "tp=4 has none of 4" in _refused(["up", file, "--dry-run", "--prefill", "tp=4,dcp=2"])


@pytest.mark.parametrize("command", ["up", "status", "logs", "scale", "down", "verify", "demo", "gateway", "plan"])
def test_the_help_of_every_command_has_an_example(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "40"})
    assert result.exit_code == 0
    assert re.search(rf"Examples?:\s+kvferry {command}", " ".join(result.stdout.split()))
