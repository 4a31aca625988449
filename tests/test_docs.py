"""The documents name tests; those tests exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMED = re.compile(r"`(test_\w+)`")
DEFINED = re.compile(r"^ *(?:async )?def (test_\w+)", re.MULTILINE)


@pytest.fixture(scope="module")
def defined() -> set[str]:
    return {name for file in (ROOT / "tests").rglob("*.py") for name in DEFINED.findall(file.read_text())}


@pytest.mark.parametrize("document", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_every_test_that_a_document_names_exists(document: Path, defined: set[str]) -> None:
    assert set(NAMED.findall(document.read_text())) <= defined
