"""The direction of imports of docs/design.md: a package imports only what stands left of it.

geometry <- protocol <- (sidechannel, transport) <- vllm, gateway <- cluster <- bench <- cli
"""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvferry

SOURCE = Path(kvferry.__file__).parent
LEVELS = (
    {"errors"},
    {"geometry"},
    {"protocol"},
    {"sidechannel", "transport"},
    {"vllm", "gateway"},
    {"cluster"},
    {"bench"},
    {"cli"},
    {"__main__"},
)
LEVEL_OF = {package: level for level, packages in enumerate(LEVELS) for package in packages}
MODULES = sorted(SOURCE.rglob("*.py"))
PROBE = """
import json, sys, threading
sys.modules["opentelemetry"] = None  # as if it were not installed
import kvferry.vllm.connector, kvferry.vllm.scheduler
modules = sorted(name for name in sys.modules if name.startswith(("nixl", "opentelemetry.")))
names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
print(json.dumps([modules, names]))
"""


def _package(module: Path) -> str:
    """The part of the project a module belongs to: ``geometry`` for src/kvferry/geometry/plan.py."""
    return module.relative_to(SOURCE).parts[0].removesuffix(".py")


def _imports(module: Path) -> Iterator[str]:
    """Every absolute module name that ``module`` imports anywhere, inside functions too."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.name}:{node.lineno}: a relative import hides its direction"
            assert node.module
            yield node.module
            if node.module == "kvferry":
                yield from (f"kvferry.{alias.name}" for alias in node.names)


def _imported_packages(module: Path) -> set[str]:
    return {name.split(".")[1] for name in _imports(module) if name.startswith("kvferry.")} - {"__version__"}


def _imported_distributions(module: Path) -> set[str]:
    return {name.partition(".")[0] for name in _imports(module)} - set(sys.stdlib_module_names) - {"kvferry"}


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_to_the_left(module: Path) -> None:
    """A module imports its own package and packages of lower levels, never a neighbour or a higher one."""
    own = _package(module)
    if own == "__init__":
        assert not _imported_packages(module)
        return
    for package in _imported_packages(module) - {own}:
        assert LEVEL_OF[package] < LEVEL_OF[own], f"{own} may not import {package}"


@pytest.mark.parametrize(
    ("distribution", "packages"),
    [
        ("nixl", {"transport"}),
        ("nixl_cu12", {"transport"}),
        ("nixl_cu13", {"transport"}),
        ("vllm", {"vllm"}),
        ("torch", {"vllm", "cluster"}),  # the cluster prepares models
    ],
)
def test_only_the_edge_imports(distribution: str, packages: set[str]) -> None:
    """NIXL is known to the transport alone, vLLM to the vLLM edge alone."""
    importers = {_package(module) for module in MODULES if distribution in _imported_distributions(module)}
    assert importers <= packages


@pytest.mark.parametrize(
    ("package", "allowed"), [("errors", set()), ("geometry", {"numpy"}), ("protocol", {"msgspec", "numpy"})]
)
def test_pure_packages_stay_pure(package: str, allowed: set[str]) -> None:
    """The core knows no socket library, no engine and no transport."""
    modules = [module for module in MODULES if _package(module) == package]
    assert modules
    assert set().union(*map(_imported_distributions, modules)) <= allowed


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_importing_the_connector_starts_nothing() -> None:
    """vLLM imports it in the API server too: no NIXL is loaded, no OpenTelemetry wanted and no thread started."""
    if not (SOURCE / "vllm" / "connector.py").exists():
        pytest.skip("there is no kvferry.vllm.connector yet")
    result = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    modules, threads = json.loads(result.stdout.splitlines()[-1])
    assert modules == []
    assert threads == []
