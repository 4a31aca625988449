"""Patched connectors of others: the patch does what it says, and only where they are loaded by that name."""

import subprocess
import sys
import types

import pytest

DEADLINE_S = 100
PROBE = """
import json, os
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector as theirs
from vllm.distributed.nixl_utils import NixlWrapper, nixl_agent_config
import sys, time
if sys.argv[1] == "patched":
    from kvferry.vllm.peers.nixl import NixlConnector
    assert NixlConnector is theirs
agent = NixlWrapper("probe", nixl_agent_config(backends=["UCX"]))
before = time.process_time()
time.sleep(1.0)
print(json.dumps(time.process_time() - before), flush=True)
os._exit(0)
"""


def test_every_agent_gets_the_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from kvferry.vllm.peers.nixl import pause_progress_threads

    made: list[tuple[str, int]] = []
    binding = types.SimpleNamespace(nixlAgent=lambda name, config: made.append((name, config.pthrDelay)))
    module = types.ModuleType("a_wrapper")
    module.nixlBind = binding  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_wrapper", module)
    wrapper = type("nixl_agent", (), {"__module__": "a_wrapper"})
    pause_progress_threads(wrapper, 700)
    binding.nixlAgent("worker", types.SimpleNamespace(pthrDelay=0))
    assert made == [("worker", 700)]
    pause_progress_threads(None, 700)  # NIXL is not installed


def _idle_cpu_s(kind: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, kind], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    return float(done.stdout.splitlines()[-1])


@pytest.mark.heavy
def test_an_agent_of_the_patched_connector_does_not_spin() -> None:
    """With the real NIXL: the thread as it is takes most of a core, if it can get one."""
    pytest.importorskip("vllm")
    pytest.importorskip("nixl")
    assert _idle_cpu_s("patched") < 0.15
    assert _idle_cpu_s("as it is") > 0.25
