"""The documents name tests and metrics and quote messages; those exist, and the metrics are all there are."""

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


@pytest.mark.parametrize("document", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: path.name)
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


def test_every_message_that_troubleshooting_quotes_is_one_of_the_codes() -> None:
    """With `…` for what differs. What stands in a first cell in backquotes is quoted, unless it names a metric."""
    said = re.sub(r'"\s*\n?\s*f?"', "", " ".join(file.read_text() for file in (ROOT / "src").rglob("*.py")))
    said = re.sub(r"\{[^{}\n]*\}|%[sdg]", "…", said).replace("%s:%d", "…:…")
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    cells = re.findall(r"^\| (?!it says|decode says|what you see|status and|-)([^|]*) \|", text, re.MULTILINE)
    quoted = [quote for cell in cells for quote in re.findall(r"`([^`]+)`", cell)]
    assert len(quoted) > 30
    for quote in quoted:
        for part in re.split(r"…+[:. ]*…*|(?<=failed): |(?<=here): ", quote):
            assert part.strip() in said, quote
