"""The cure for loops around sched_yield reaches Python and C, and only the process that asked for it."""

import subprocess
import sys

import pytest

SOFTENED = """
import os, time
from kvferry.vllm.cpu_yield import soften_sched_yield
soften_sched_yield(20_000)
start = time.monotonic()
os.sched_yield()
print(time.monotonic() - start >= 0.02)
"""
# ru_nvcsw counts voluntary context switches: two processes that yield to each other on one core make many.
IGNORED = """
import ctypes, os, resource, sys, time
from kvferry.vllm.cpu_yield import ignore_sched_yield
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
if sys.argv[1] == "ignored":
    ignore_sched_yield()
libc = ctypes.CDLL(None)
end = time.monotonic() + 0.5
other = os.fork()
calls = failures = 0
while time.monotonic() < end:
    failures += libc.sched_yield() != 0
    calls += 1
if other == 0:
    os._exit(0)
os.waitpid(other, 0)
usage = resource.getrusage(resource.RUSAGE_SELF)
print(failures, (usage.ru_nvcsw + usage.ru_nivcsw) / calls)
"""


def _run(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def test_pythons_yield_sleeps() -> None:
    assert _run(SOFTENED) == "True"


@pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")
def test_a_yield_from_c_succeeds_and_does_nothing() -> None:
    failures, switches_per_call = _run(IGNORED, "ignored").split()
    assert failures == "0"
    assert float(switches_per_call) < 0.01
    assert float(_run(IGNORED, "left alone").split()[1]) > 0.01
