"""``kvferry up`` with real engines: what it serves is what a plain engine answers, and nothing of it is left."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from kvferry.cluster.chat import ask
from kvferry.cluster.doctor.pairs import Connected, Works
from kvferry.cluster.tiny import tiny
from kvferry.errors import DispatchError

from .conftest import CACHE_BYTES, Fleet
from .waiting import await_that

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

START_S, STOP_S, ANSWER_S = 420.0, 120.0, 120.0
PAUSE_S = 0.5  # between a client's requests: without it they keep a small machine from ever starting one engine more
MODEL = "model"
WORDS = ["ferry", "river", "bank", "bridge", "stone", "iron", "keeper", "lock", "hour", "people", "car", "time"]
FLAGS = ("--", "--dtype", "float32", "--kv-cache-memory-bytes", str(CACHE_BYTES))
# Whoever runs the tests may have had signals ignored, which children inherit.
AS_FROM_A_SHELL = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


@dataclass
class Up:
    """A cluster that the command started, and the other commands for it."""

    directory: Path
    url: str = ""

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "KVFERRY_STATE": str(self.directory / "state")}

    @contextmanager
    def serving(self, *options: str) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-m", "kvferry", "up", str(tiny("qwen2")), "--served-model-name", MODEL]
        command = [sys.executable, "-c", AS_FROM_A_SHELL, *command, *options, *FLAGS]
        log = self.directory / "up.log"
        with (
            log.open("w") as output,
            subprocess.Popen(command, env=self.environment, stdout=output, stderr=subprocess.STDOUT, text=True) as up,
        ):
            try:
                await_that(lambda: up.poll() is not None or bool(_served(log)), START_S, "serving")
                assert up.poll() is None, log.read_text()
                self.url = _served(log)
                yield up
            finally:
                up.terminate()
                up.wait(STOP_S)

    def command(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "kvferry", *arguments]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=START_S, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def instances(self) -> dict[str, dict[str, Any]]:
        return {one["name"]: one for one in json.loads(self.command("status", "--json"))["instances"]}

    def kill(self, name: str) -> None:
        """The API server of an instance, without a word."""
        port = self.instances()[name]["url"].rpartition(":")[2]
        [server] = [p for p in self.processes() if port in p.cmdline() and "kvferry.cluster.guard" not in p.cmdline()]
        server.kill()

    def await_ready(self, name: str, restarts: int) -> None:
        def ready() -> bool:
            one = self.instances()[name]
            return bool(one["restarts"] == restarts and one["state"] == "ready")

        await_that(ready, START_S, f"{name} is back")

    def processes(self) -> list[psutil.Process]:
        """Whatever it started that still runs, whoever the parent is by now."""
        return [process for process in psutil.process_iter() if self._is_mine(process)]

    def _is_mine(self, process: psutil.Process) -> bool:
        try:
            mine = process.environ().get("KVFERRY_STATE") == self.environment["KVFERRY_STATE"]
            return mine and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


def _served(log: Path) -> str:
    found = re.search(rf"serving {MODEL} on (http\S+)/v1", log.read_text())
    return found[1] if found else ""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Up]:
    cluster = Up(tmp_path)
    yield cluster
    left = cluster.processes()
    for process in left:
        process.kill()
    assert not left


def _questions(seed: int, number: int) -> list[str]:
    source = random.Random(seed)
    return [" ".join(source.choice(WORDS) for _ in range(60)) for _ in range(number)]


def _whole(url: str, question: str) -> str:
    """The answer to a request that is not streamed."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": question}], "max_tokens": 8, "temperature": 0.0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=ANSWER_S, trust_env=False)
    if answer.status_code != httpx.codes.OK:
        raise DispatchError(f"{answer.status_code}: {answer.text[:300]}")
    return str(answer.json()["choices"][0]["message"]["content"])


def _assert_equal(url: str, plain: str, questions: Sequence[str]) -> None:
    """Every other one streamed."""
    for number, question in enumerate(questions):
        expected = ask(plain, question, 8)
        if number % 2:
            assert ask(url, question, 8) == expected
        else:
            assert _whole(url, question) == expected.text


def test_what_up_serves_equals_a_plain_engine_and_sigterm_leaves_nothing(fleet: Fleet, cluster: Up) -> None:
    plain = fleet.plain("qwen2").url
    with cluster.serving("--prefill", "pp=2") as up:
        _assert_equal(cluster.url, plain, _questions(1, 6))
        moved = httpx.get(f"{cluster.instances()['decode-0']['url']}/metrics", trust_env=False).text
        [count] = re.findall(r"^vllm:nixl_bytes_transferred_count\S* (\S+)", moved, re.MULTILINE)
        assert float(count) >= 7  # the probe, and every question
        told = json.loads(cluster.command("doctor", "--cluster", "--json"))
        [pair] = told["pairs"]
        assert (pair["prefill"], pair["decode"]) == ("prefill-0", "decode-0")
        assert (pair["works"], pair["connected"]) == (Works.YES, Connected.YES)
        assert (told["problems"], told["warnings"]) == (0, 0)
        up.send_signal(signal.SIGTERM)
        assert up.wait(STOP_S) == 0
        assert cluster.processes() == []


@pytest.mark.heavy
@pytest.mark.parametrize("replicas", [2])
def test_fifty_chats_survive_the_kill_of_a_prefill_and_of_a_decode(fleet: Fleet, cluster: Up, replicas: int) -> None:
    plain = fleet.plain("qwen2").url
    questions = _questions(2, 50)
    sizes = ("--prefill-replicas", str(replicas), "--decode-replicas", "2")
    with cluster.serving("--prefill", "pp=2", *sizes):
        _assert_equal(cluster.url, plain, questions[:20])
        cluster.kill("prefill-0")
        _assert_equal(cluster.url, plain, questions[20:30])
        cluster.kill("decode-1")
        _assert_equal(cluster.url, plain, questions[30:40])
        cluster.await_ready("prefill-0", 1)
        cluster.await_ready("decode-1", 1)
        _assert_equal(cluster.url, plain, questions[40:])


@pytest.mark.heavy
def test_scaling_decode_under_load_fails_no_request(fleet: Fleet, cluster: Up) -> None:
    plain = fleet.plain("qwen2").url
    questions = _questions(3, 12)
    expected = {question: ask(plain, question, 8).text for question in questions}
    end = threading.Event()

    def client(number: int) -> int:
        answered = 0
        while not end.is_set():
            question = questions[(number + 5 * answered) % len(questions)]
            text = ask(cluster.url, question, 8).text if answered % 2 else _whole(cluster.url, question)
            assert text == expected[question]
            answered += 1
            end.wait(PAUSE_S)
        return answered

    with cluster.serving("--prefill", "pp=2"), ThreadPoolExecutor(3) as pool:
        clients = [pool.submit(client, number) for number in range(3)]
        try:
            assert "decode=2" in cluster.command("scale", "decode=2")
            added = cluster.instances()["decode-1"]["url"]
            await_that(lambda: _moved(added) >= 3, ANSWER_S, "the new one being used")
            assert "decode=1" in cluster.command("scale", "decode=1")
        finally:
            end.set()
        assert sum(one.result(ANSWER_S) for one in clients) > 10
        assert "decode-1" not in cluster.instances()


def _moved(url: str) -> float:
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    return sum(map(float, re.findall(r"^vllm:nixl_bytes_transferred_count\S* (\S+)", text, re.MULTILINE)))


@pytest.mark.heavy
def test_the_commands_of_a_dry_run_serve_the_same(fleet: Fleet, cluster: Up) -> None:
    plain = fleet.plain("qwen2").url
    options = ("--prefill", "pp=2", "--served-model-name", MODEL, "--dry-run")
    text = cluster.command("up", str(tiny("qwen2")), *options, *FLAGS)
    _, keys, *commands = re.split(r"^# .*\n", text, flags=re.MULTILINE)[1:]
    subprocess.run(["bash", "-c", keys], check=True)
    with (cluster.directory / "shells.log").open("w") as log:
        shells = [
            subprocess.Popen(
                ["bash", "-c", command],
                env=cluster.environment,
                start_new_session=True,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for command in commands
        ]
    try:
        found = re.search(r"^gateway: (http\S+)", text.replace("# ", ""), re.MULTILINE)
        assert found
        await_that(lambda: _is_ready(found[1]), START_S, "serving")
        _assert_equal(found[1], plain, _questions(4, 4))
    finally:
        for shell in shells:
            os.killpg(shell.pid, signal.SIGTERM)
        for shell in shells:
            shell.wait(STOP_S)
    await_that(lambda: not cluster.processes(), STOP_S, "the end of all processes")


JUST = shutil.which("just", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")


@pytest.mark.heavy
@pytest.mark.skipif(JUST is None, reason="just is not installed")
def test_the_recipes_of_a_justfile_serve_the_same(fleet: Fleet, cluster: Up) -> None:
    plain = fleet.plain("qwen2").url
    flags = {"dtype": "float32", "kv-cache-memory-bytes": CACHE_BYTES}
    manifest = {"model": str(tiny("qwen2")), "served_model_name": MODEL, "vllm": flags}
    file = cluster.directory / "cluster.yaml"
    file.write_text(json.dumps(manifest))  # JSON is YAML
    cluster.command("render", "just", str(file), "--output", str(cluster.directory))
    command = [str(JUST), "--justfile", str(cluster.directory / "justfile")]
    with (cluster.directory / "just.log").open("w") as log:
        shells = [
            subprocess.Popen(
                [*command, recipe],
                env=cluster.environment,
                start_new_session=True,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for recipe in ("prefill-0", "decode-0", "gateway")
        ]
    try:
        subprocess.run([*command, "ready"], env=cluster.environment, timeout=START_S, check=True)
        text = (cluster.directory / "justfile").read_text()
        [url] = re.findall(r"--output /dev/null (http\S+)/ready", text)
        await_that(lambda: _is_ready(url), START_S, "serving")
        _assert_equal(url, plain, _questions(5, 2))
        asked = subprocess.run(
            [*command, "ask", WORDS[0]], env=cluster.environment, timeout=ANSWER_S, check=True, capture_output=True
        )
        assert json.loads(asked.stdout)["choices"]
        [decode] = re.findall(r"--decode (http\S+)", text)
        assert _moved(decode) >= 2
    finally:
        for shell in shells:
            os.killpg(shell.pid, signal.SIGTERM)
        for shell in shells:
            shell.wait(STOP_S)
    await_that(lambda: not cluster.processes(), STOP_S, "the end of all processes")


def _is_ready(url: str) -> bool:
    """Both roles: without prefill the gateway would let decode do everything."""
    try:
        usable = httpx.get(f"{url}/ready", trust_env=False).json()
    except httpx.TransportError:
        return False
    return bool(usable["prefill"] and usable["decode"])
