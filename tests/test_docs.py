"""The documents name tests and metrics; those exist, and are all there are."""

import re
from pathlib import Path

import pytest

from .exported import Exported, of_the_connector, of_the_gateway

ROOT = Path(__file__).parent.parent
NAMED = re.compile(r"`(test_\w+)`")
DEFINED = re.compile(r"^ *(?:async )?def (test_\w+)", re.MULTILINE)


@pytest.fixture(scope="module")
def defined() -> set[str]:
    return {name for file in (ROOT / "tests").rglob("*.py") for name in DEFINED.findall(file.read_text())}


@pytest.mark.parametrize("document", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_every_test_that_a_document_names_exists(document: Path, defined: set[str]) -> None:
    assert set(NAMED.findall(document.read_text())) <= defined


def _row(metric: Exported) -> str:
    """A metric's line in docs/observability.md."""
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    values = ", ".join(f"`{value}`" for value in metric.values)
    cells = (f"`{metric.name}`", metric.kind, f"{labels}: {values}" if values else labels, metric.text)
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("metrics", [of_the_connector, of_the_gateway], ids=["connector", "gateway"])
def test_the_table_of_metrics_is_what_the_code_exports(metrics) -> None:
    rows = [_row(metric) for metric in metrics()]
    lines = (ROOT / "docs" / "observability.md").read_text().splitlines()
    first = lines.index(rows[0])
    assert lines[first : first + len(rows) + 1] == [*rows, ""]


def test_every_figure_of_the_log_line_is_described() -> None:
    from kvferry.vllm.metrics import METRICS, TransferStats

    stats = TransferStats()
    for key, metric in METRICS.items():
        for value in metric.values or ("",):
            stats.add(key, 2, value)
    text = " ".join((ROOT / "docs" / "observability.md").read_text().split())
    assert [figure for figure in stats.reduce() if f"`{figure}`" not in text] == []
