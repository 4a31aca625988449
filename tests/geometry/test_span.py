from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.geometry import Span, heads_of_rank

SIZES = st.integers(1, 24)
SPANS = st.builds(Span, st.integers(0, 40), st.integers(0, 40))


@given(SPANS, SPANS)
def test_intersection_holds_exactly_the_common_numbers(one: Span, other: Span) -> None:
    """``&`` agrees with the intersection of sets, and is falsy exactly where that is empty."""
    both = set(range(*one)) & set(range(*other))
    part = one & other
    assert set(range(*part)) == both
    assert bool(part) == bool(both)
    assert part.size == len(both)


def test_span_prints_as_half_open() -> None:
    """People read spans in error messages."""
    assert str(Span(2, 5)) == "[2, 5)"


@given(SIZES, SIZES)
def test_heads_of_all_ranks_cover_every_head(heads: int, tp: int) -> None:
    """No head is lost, whatever the sizes, dividing or not."""
    held = [heads_of_rank(heads, tp, rank) for rank in range(tp)]
    assert set().union(*(range(*span) for span in held)) == set(range(heads))
    assert all(held)


@given(SIZES, SIZES)
def test_ranks_share_heads_only_as_whole_replicas(heads: int, tp: int) -> None:
    """Two ranks hold the same heads or none in common, in rank order."""
    held = [heads_of_rank(heads, tp, rank) for rank in range(tp)]
    for one, other in itertools.pairwise(held):
        assert one == other or one.stop == other.start
    assert len(set(held)) == min(heads, tp)


@given(SIZES, SIZES)
def test_replicas_are_spread_evenly(heads: int, tp: int) -> None:
    """No shard has two replicas more than another, and no rank two heads more than another."""
    held = [heads_of_rank(heads, tp, rank) for rank in range(tp)]
    replicas = [held.count(span) for span in set(held)]
    assert max(replicas) - min(replicas) <= 1
    assert max(span.size for span in held) - min(span.size for span in held) <= 1


@pytest.mark.parametrize(
    ("heads", "tp", "expected"),
    [
        (8, 2, [(0, 4), (4, 8)]),
        (6, 3, [(0, 2), (2, 4), (4, 6)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 3, [(0, 1)] * 3),
    ],
)
def test_ranks_hold_what_vllm_gives_them(heads: int, tp: int, expected: list[tuple[int, int]]) -> None:
    """Dividing sizes, replicated heads and a latent cache as vLLM lays them out."""
    assert [heads_of_rank(heads, tp, rank) for rank in range(tp)] == expected


@pytest.mark.parametrize(("heads", "tp", "rank"), [(0, 1, 0), (4, 0, 0), (4, 2, 2), (4, 2, -1)])
def test_impossible_ranks_are_refused(heads: int, tp: int, rank: int) -> None:
    """A size below one or a rank outside the group is an error, not an empty range."""
    with pytest.raises(ValueError, match="no heads for"):
        heads_of_rank(heads, tp, rank)
