"""Engines started the ways people start them today, each against an engine that has the core in its own process."""

import json
import os
import queue
import random
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.cluster.commands import CPU_ENVIRONMENT, cpu_build_installed
from kvferry.cluster.dispatch import PREFILL_PARAMETERS
from kvferry.cluster.launch import logging_transfers, start_instances
from kvferry.cluster.ports import free_ports
from kvferry.cluster.spec import InstanceSpec, Layout
from kvferry.cluster.supervisor import Supervisor
from kvferry.cluster.tiny import tiny
from kvferry.cluster.transfers import await_transfers

from .conftest import Fleet, Instance

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

KIND = "llama"
START_DEADLINE_S = 300.0
ANSWER_DEADLINE_S = 60.0
FLAGS = ("--trust-remote-code", "--api-server-count", "2")
VARIABLES = {"VLLM_WORKER_MULTIPROC_METHOD": "fork", "VLLM_SERVER_DEV_MODE": "1"}


class InProcessEngine:
    """A child process that holds a whole engine; ended when the test is."""

    def __init__(self, model: Path, log: Path) -> None:
        environment = {**os.environ, **CPU_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "in_process.py"), str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                self._lines.put(line.removeprefix("RESULT ").strip())

    def wait_ready(self) -> None:
        assert self._lines.get(timeout=START_DEADLINE_S) == "ready"

    def generate(self, prompt: list[int], parameters: Any, tokens: int) -> tuple[list[int], Any]:
        assert self._process.stdin
        self._process.stdin.write(json.dumps([prompt, parameters, tokens]) + "\n")
        self._process.stdin.flush()
        answer, produced = json.loads(self._lines.get(timeout=ANSWER_DEADLINE_S))
        return answer, produced

    def close(self) -> None:
        with self._process, self._log:  # closes the pipes
            self._process.kill()
            self._reader.join(10)


@pytest.fixture(scope="module")
def parties(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Instance, InProcessEngine]]:
    directory = tmp_path_factory.mktemp("ways")
    [port] = free_ports(1)
    log = directory / "transfers.jsonl"
    spec = InstanceSpec("forked", tiny(KIND), Layout.parse("pp=2"), port, "kv_both", extra=FLAGS, environment=VARIABLES)
    engine = InProcessEngine(spec.model, directory / "in-process.log")
    try:
        with Supervisor(directory) as supervisor:
            instance = Instance(logging_transfers(spec, log), log, supervisor)
            start_instances(supervisor, [instance.spec], cpu_build_installed(), lambda *_: None, START_DEADLINE_S)
            engine.wait_ready()
            yield instance, engine
    finally:
        engine.close()


@pytest.fixture
def prompt() -> list[int]:
    return [random.Random(4711).randint(10, 370) for _ in range(400)]


def test_an_engine_in_its_callers_process_loads_from_forked_workers(
    fleet: Fleet, parties: tuple[Instance, InProcessEngine], prompt: list[int]
) -> None:
    instance, engine = parties
    prefill = fleet.dispatcher.prefill(instance.url, prompt, uuid.uuid4().hex)
    tokens, _ = engine.generate(prompt, prefill.kv_transfer_params, 8)
    assert tokens == list(fleet.dispatcher.complete(instance.url, prompt).tokens)


def test_forked_workers_behind_two_api_servers_load_from_an_engine_in_its_callers_process(
    fleet: Fleet, parties: tuple[Instance, InProcessEngine], prompt: list[int]
) -> None:
    """The caller's engine is not stepped meanwhile: its memory is read, and its listener answers."""
    instance, engine = parties
    prompt = prompt[::-1]
    _, parameters = engine.generate(prompt, dict(PREFILL_PARAMETERS), 1)
    request_id = uuid.uuid4().hex
    answer = fleet.dispatcher.decode(instance.url, prompt, request_id, parameters)
    moved = await_transfers(instance.transfer_log, lambda t: request_id in t.request, 2, ANSWER_DEADLINE_S)
    assert [transfer.used for transfer in moved.transfers] == [True, True]
    tokens, _ = engine.generate(prompt, None, 8)
    assert list(answer.tokens) == tokens
