"""Every vLLM of the window, and the last one before it, in processes that have it in place of the environment's own."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from kvferry.cluster.commands import engine_command, engine_environment
from kvferry.cluster.ports import free_ports
from kvferry.cluster.spec import InstanceSpec, Layout
from kvferry.cluster.tiny import tiny
from kvferry.vllm.versions import minor_version

from .overlays import BEFORE, RELEASES, Release, environment, installed, overlay

RUN_S, START_S = 3000.0, 600.0
pytestmark = [pytest.mark.heavy, pytest.mark.timeout(RUN_S + START_S)]

ROOT = Path(__file__).parents[2]
LINES = 60  # shown of a process that ended otherwise than it had to
UNITS = ("tests/vllm", "tests/kinds/test_kinds.py", "tests/versions/test_signatures.py", "-m", "not heavy")
PAIR = ("qwen2", "pp=2", "tp=2")
ENGINES = (
    "tests/engines/test_pairs.py::test_the_tokens_are_those_of_a_plain_engine[{}:{}->{}]".format(*PAIR),
    "tests/engines/test_pairs.py::test_an_engine_is_of_the_vllm_that_is_installed",
)
EACH = pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)


def _python(
    release: Release, arguments: Sequence[str], seconds: float, more: Mapping[str, str] = {}
) -> tuple[int, str]:
    """Exit code and output of a Python process that has a release; skipped where that is the environment's own."""
    if minor_version(release.version) == minor_version(installed()):
        pytest.skip("the environment has it: the whole suite is run with it")
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**environment(overlay(release)), **more},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    return done.returncode, done.stdout


def _pytest(release: Release, tests: Sequence[str]) -> None:
    code, output = _python(release, ["-m", "pytest", "-q", "-p", "no:cacheprovider", *tests], RUN_S)
    assert code == 0, _end(output)


def _end(output: str) -> str:
    return "\n".join(output.splitlines()[-LINES:])


def _refused(release: Release, more: Mapping[str, str] = {}) -> str:
    """What an engine says that does not start."""
    [port] = free_ports(1)
    spec = InstanceSpec("refused", tiny("qwen2"), Layout(), port, "kv_both")
    code, output = _python(release, engine_command(spec)[1:], START_S, engine_environment(spec, more))
    assert code != 0, _end(output)
    return output


@EACH
def test_the_vllm_of_an_overlay_is_the_one_that_is_imported(release: Release) -> None:
    code, output = _python(release, ["-c", "import vllm; print(vllm.__version__, vllm.__file__)"], START_S)
    assert code == 0, _end(output)
    assert output.splitlines()[-1] == f"{release.version} {overlay(release) / 'vllm' / '__init__.py'}"


@EACH
def test_interface_halves_and_caches_are_right_with_each_release(release: Release) -> None:
    _pytest(release, UNITS)


@EACH
def test_engines_of_each_release_give_the_tokens_of_a_plain_one(release: Release) -> None:
    if release.no_engines:
        pytest.skip(release.no_engines)
    _pytest(release, ENGINES)


@pytest.mark.parametrize("release", [release for release in RELEASES if release.no_engines], ids=lambda r: r.version)
def test_a_release_that_no_engine_is_run_with_starts_none_here(release: Release) -> None:
    """Told that this is a CPU, it misses its kernels. Once it does not, nothing keeps it from being tested."""
    output = _refused(release, {"VLLM_TARGET_DEVICE": "cpu"})
    assert "'_OpNamespace' '_C' object has no attribute 'init_cpu_memory_env'" in output, _end(output)


def test_a_release_before_the_window_is_refused_in_one_line() -> None:
    assert f"KVFerry works with vLLM 0.30 to 0.33, and this is {BEFORE.version}" in _refused(BEFORE).splitlines()[-1]
