"""The Grafana dashboard: what Grafana wants of it, and that it asks for nothing that is not there."""

import importlib.util
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from .exported import of_the_connector, of_the_gateway, of_vllm

SOURCE = Path(__file__).parent.parent / "dashboards" / "make.py"
SERIES = re.compile(r"\b(?:vllm:|kvferry:|kvferry_gateway_)\w+")
GROUPED = re.compile(r"by \(([^)]*)\)")
LEGEND = re.compile(r"\{\{(\w+)\}\}")
EVERYWHERE = {"le", "instance", "engine"}  # of histograms, of Prometheus, of vLLM
RENAMED = {"instance": "exported_instance"}  # by Prometheus, which has an `instance` of its own
GRID_COLUMNS = 24


@pytest.fixture(scope="module")
def written() -> dict[str, Any]:
    return json.loads(SOURCE.with_name("kvferry.json").read_text())


@pytest.fixture(scope="module")
def panels(written: dict[str, Any]) -> list[dict[str, Any]]:
    return written["panels"]


@pytest.fixture(scope="module")
def targets(panels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [target for panel in panels for target in panel.get("targets", ())]


def _cells(panel: dict[str, Any]) -> Iterator[tuple[int, int]]:
    place = panel["gridPos"]
    rows = range(place["y"], place["y"] + place["h"])
    return itertools.product(range(place["x"], place["x"] + place["w"]), rows)


def _lost(given: Any, kept: Any, path: str = "") -> list[str]:
    """What of ``given`` is not in ``kept``."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [one for key, value in given.items() for one in _lost(value, kept.get(key), f"{path}/{key}")]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [one for index, value in enumerate(given) for one in _lost(value, kept[index], f"{path}/{index}")]
    return [] if given == kept else [path]


def test_the_file_is_what_its_source_writes() -> None:
    spec = importlib.util.spec_from_file_location("make_dashboard", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.text() == SOURCE.with_name("kvferry.json").read_text(), "run python dashboards/make.py"


def test_grafanas_own_schema_knows_everything_in_it(written: dict[str, Any]) -> None:
    register_default_plugins()
    kept = json.loads(JSONEncoder().encode(Dashboard.from_json(written)))
    assert _lost(written, kept) == []


def test_it_can_be_imported_beside_others_and_with_any_data_source(written: dict[str, Any]) -> None:
    assert written["schemaVersion"] >= 36  # data sources are named by uid from there on
    assert written["uid"]
    assert "id" not in written
    variables = {variable["name"]: variable for variable in written["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    named = re.findall(r'"uid": "([^"]*)"', json.dumps({**written, "uid": None}))
    assert set(named) == {"${datasource}"}


def test_panels_have_an_id_and_a_place_each(panels: list[dict[str, Any]]) -> None:
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    cells = [cell for panel in panels for cell in _cells(panel)]
    assert len(set(cells)) == len(cells)
    assert max(column for column, _ in cells) < GRID_COLUMNS
    for panel in panels:
        refs = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(refs)) == len(refs)


def test_every_panel_says_what_it_shows(panels: list[dict[str, Any]]) -> None:
    graphs = [panel for panel in panels if panel["type"] != "row"]
    assert graphs
    for panel in graphs:
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["targets"]
        assert panel["fieldConfig"]["defaults"]["unit"]


def test_every_metric_it_asks_for_is_exported(targets: list[dict[str, Any]]) -> None:
    known = {name for metric in (*of_the_connector(), *of_the_gateway(), *of_vllm()) for name in metric.series}
    asked = {name for target in targets for name in SERIES.findall(target["expr"])}
    assert asked <= known
    assert all(any(name.startswith(prefix) for name in asked) for prefix in ("vllm:", "kvferry:", "kvferry_gateway_"))


def test_every_label_it_groups_by_is_that_metrics(targets: list[dict[str, Any]]) -> None:
    exported = (*of_the_connector(), *of_the_gateway())
    labels = {name: {RENAMED.get(one, one) for one in m.labels} for m in exported for name in m.series}
    for target in targets:
        known = EVERYWHERE.union(*(labels.get(name, ()) for name in SERIES.findall(target["expr"])))
        grouped = {label.strip() for group in GROUPED.findall(target["expr"]) for label in group.split(",")}
        assert grouped <= known, target["expr"]
        assert set(LEGEND.findall(target["legendFormat"])) <= known, target["legendFormat"]


def test_everything_that_the_connector_exports_is_shown(targets: list[dict[str, Any]]) -> None:
    asked = {name for target in targets for name in SERIES.findall(target["expr"])}
    unseen = {metric.name for metric in of_the_connector() if not metric.series & asked}
    assert unseen == {"vllm:nixl_post_time_seconds", "kvferry:layout_info", "kvferry:side_channel_info"}
