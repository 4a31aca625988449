"""The documents name tests and quote messages; both exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMED = re.compile(r"`(test_\w+)`")
DEFINED = re.compile(r"^ *(?:async )?def (test_\w+)", re.MULTILINE)


@pytest.fixture(scope="module")
def defined() -> set[str]:
    return {name for file in (ROOT / "tests").rglob("*.py") for name in DEFINED.findall(file.read_text())}


@pytest.mark.parametrize("document", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: path.name)
def test_every_test_that_a_document_names_exists(document: Path, defined: set[str]) -> None:
    assert set(NAMED.findall(document.read_text())) <= defined


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
