"""docs/compatibility.md says what the tests show, no more and no less."""

from kvferry.cluster.tiny import RECIPES

from .evidence import DOCUMENT, OTHER, REFUSED, RUN_AS, document
from .kinds import KINDS


def test_the_document_is_what_the_tests_say() -> None:
    assert DOCUMENT.read_text() == document(), "python -m tests.kinds.evidence writes it anew"


def test_every_tiny_model_is_of_a_kind_that_is_checked_too() -> None:
    assert set(RUN_AS) == set(RECIPES) - {"qwen3-fat"}, "that one is for benchmarks"
    assert set(RUN_AS.values()) <= {kind.name for kind in KINDS}


def test_each_kind_has_one_row() -> None:
    for names in ([kind.name for kind in KINDS], [row[0] for row in OTHER], [row[0] for row in REFUSED]):
        assert len(set(names)) == len(names)
