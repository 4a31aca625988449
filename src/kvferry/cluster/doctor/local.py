"""All that can be said about this machine by itself."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvferry.cluster.doctor import fabric, machine, software
from kvferry.cluster.doctor.findings import Check, Finding, guarded


def _software() -> list[Finding]:
    """Versions first: they are known even where the binaries do not load."""
    said = software.loaded_binaries()
    return [*software.versions(said.get("cuda")), software.abi(said)]


CHECKS: tuple[tuple[str, Check], ...] = (
    ("versions", _software),
    ("plugin", software.this_plugin),
    ("VLLM_PLUGINS", software.plugin_filter),
    ("ucx", fabric.this_fabric),
    ("GPU/NIC affinity", machine.this_affinity),
    ("locked memory", machine.this_locked_memory),
    ("shared memory", machine.this_shared_memory),
    ("ports", machine.this_ports),
    ("advertised host", machine.this_advertised_host),
)


def examine(checks: Sequence[tuple[str, Check]] = CHECKS) -> list[Finding]:
    """Every check at the same time, since two of them wait for processes; findings come in the order of the checks."""
    with ThreadPoolExecutor(len(checks)) as pool:
        return [finding for found in pool.map(lambda check: guarded(*check), checks) for finding in found]
