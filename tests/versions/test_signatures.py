"""The connector against the connector interface of every vLLM of the window: recorded, and checked where installed."""

import ast
import importlib.util
import json
from itertools import product
from pathlib import Path

import pytest

import kvferry.vllm
from kvferry.vllm.versions import NEWEST, OLDEST, minor_version

from .overlays import RELEASES, installed
from .signatures import RECORDS, Class, interface, of_self, read, record, signatures

THEIRS: dict[str, dict[str, Class]] = {file.stem: json.loads(file.read_text()) for file in RECORDS.glob("*.json")}

_OWN_SOURCE = {
    name: definition
    for module in ("connector", "metrics", "metadata")
    for name, definition in read(Path(kvferry.vllm.__path__[0]) / f"{module}.py").items()
}
OURS = {name: signatures(definition) for name, definition in _OWN_SOURCE.items()}
SUBCLASSES = [name for name, ours in OURS.items() if any(base in THEIRS["0.32"] for base in ours["bases"])]
EACH = sorted(product(THEIRS, SUBCLASSES))

LATER = {"get_loaded_kv_cache_group_ids": "0.32", "supports_sleep_mode": "0.33"}
"""Hooks that not every version of the window calls, and the first that does."""

REPLACED = {"_cache_hit_source", "data"}
"""Attributes of vLLM's classes that are given another value on purpose."""


def _bases(version: str, name: str) -> list[Class]:
    return [THEIRS[version][base] for base in OURS[name]["bases"] if base in THEIRS[version]]


def _methods(version: str, name: str) -> dict[str, str]:
    return {method: signature for base in _bases(version, name) for method, signature in base["methods"].items()}


def _attributes(version: str, name: str) -> set[str]:
    return {attribute for base in _bases(version, name) for attribute in base["attributes"]}


def _installed_tree() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    return Path(spec.submodule_search_locations[0])


def test_there_is_a_record_and_a_release_of_every_version_of_the_window() -> None:
    (major, first), (_, last) = OLDEST, NEWEST
    assert set(THEIRS) == {f"{major}.{minor}" for minor in range(first, last + 1)}
    assert [minor_version(release.version) for release in RELEASES] == sorted(map(minor_version, THEIRS))


def test_the_record_of_the_installed_vllm_is_true() -> None:
    tree = _installed_tree()
    version = installed()
    told = json.loads(record(version).read_text())
    assert told == interface(tree), f"python -m tests.versions.signatures {version} {tree} makes it anew"


def test_every_class_that_vllm_is_handed_is_looked_at() -> None:
    assert set(SUBCLASSES) == {
        *("KVFerryConnector", "TransferStats", "TransferMetrics"),
        *("Handshake", "StepMetadata", "Executed"),
    }


@pytest.mark.parametrize(("version", "name"), EACH)
def test_what_is_overridden_has_vllms_kind_and_parameters(version: str, name: str) -> None:
    theirs, ours = _methods(version, name), OURS[name]["methods"]
    both = theirs.keys() & ours.keys()
    assert {method: ours[method] for method in both} == {method: theirs[method] for method in both}


@pytest.mark.parametrize(("version", "name"), EACH)
def test_what_has_to_be_overridden_is(version: str, name: str) -> None:
    abstract = {method for base in _bases(version, name) for method in base["abstract"]}
    assert abstract <= OURS[name]["methods"].keys()


@pytest.mark.parametrize("version", sorted(THEIRS))
def test_every_hook_is_one_of_vllms(version: str) -> None:
    """A public method that vLLM does not know is never called, and a hook that it has renamed is one."""
    hooks = {method for method in OURS["KVFerryConnector"]["methods"] if not method.startswith("_")}
    later = {hook for hook, since in LATER.items() if minor_version(version) < minor_version(since)}
    assert hooks - _methods(version, "KVFerryConnector").keys() == later


@pytest.mark.parametrize(("version", "name"), EACH)
def test_what_is_used_of_a_base_class_is_there(version: str, name: str) -> None:
    own = {*OURS[name]["methods"], *OURS[name]["attributes"]}
    used = of_self(_OWN_SOURCE[name], ast.Load) - own
    assert used <= _methods(version, name).keys() | _attributes(version, name)


@pytest.mark.parametrize(("version", "name"), EACH)
def test_nothing_of_a_base_class_is_replaced_unawares(version: str, name: str) -> None:
    theirs = _methods(version, name).keys() | _attributes(version, name)
    private = {method for method in OURS[name]["methods"] if method.startswith("_") and not method.startswith("__")}
    assert (private | set(OURS[name]["attributes"])) & theirs <= REPLACED


@pytest.mark.parametrize("version", sorted(THEIRS))
def test_the_results_of_loads_have_the_same_names_on_their_way(version: str) -> None:
    """What the workers report, and what the scheduler half is then handed."""
    report = {"finished_sending", "finished_recving", "failed_recving"}
    assert set(THEIRS[version]["KVConnectorTransferResults"]["attributes"]) == report
    assert {*report, "kv_connector_worker_meta"} <= set(THEIRS[version]["KVConnectorOutput"]["attributes"])


@pytest.mark.parametrize("version", sorted(THEIRS))
def test_the_roles_are_two(version: str) -> None:
    assert THEIRS[version]["KVConnectorRole"]["attributes"] == ["SCHEDULER", "WORKER"]
