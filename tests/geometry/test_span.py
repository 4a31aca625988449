from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.geometry import Span, TokenShare, heads_of_rank

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


CONTEXTS = st.tuples(st.integers(1, 5), st.integers(1, 6))
"""Number of ranks, and tokens that each takes at a time."""

TOKENS = 300
"""More than two of the above take to repeat."""


def _shares(context: tuple[int, int]) -> list[TokenShare]:
    size, interleave = context
    return [TokenShare(size, rank, interleave) for rank in range(size)]


def _held(share: TokenShare) -> list[int]:
    return np.flatnonzero(share.holds(np.arange(TOKENS))).tolist()


@given(CONTEXTS)
def test_each_token_is_in_exactly_one_share(context: tuple[int, int]) -> None:
    """Round and round, as many at a time as the interleave says."""
    size, interleave = context
    held = [_held(share) for share in _shares(context)]
    assert sorted(token for tokens in held for token in tokens) == list(range(TOKENS))
    assert held[0][:interleave] == list(range(interleave))
    assert held[-1][0] == (size - 1) * interleave


@given(CONTEXTS, st.integers(1, 4))
def test_a_token_comes_where_vllm_puts_it(context: tuple[int, int], factor: int) -> None:
    """By the formula, in the names, of its slot mapping: at which offset in which block of the request's."""
    size, interleave = context
    block_size = factor * interleave
    virtual_block_size = block_size * size
    for share in _shares(context):
        for token in _held(share):
            offset = token % virtual_block_size
            assert offset // interleave % size == share.rank
            local_offset = offset // (size * interleave) * interleave + offset % interleave
            assert divmod(share.place(token), block_size) == (token // virtual_block_size, local_offset)


@given(CONTEXTS)
def test_places_count_what_is_held(context: tuple[int, int]) -> None:
    """``place`` numbers the tokens of a share through, ``position`` undoes it, and ``before`` counts them."""
    for share in _shares(context):
        held = np.array(_held(share))
        assert share.place(held).tolist() == list(range(len(held)))
        assert (share.position(share.place(held)) == held).all()
        assert [share.before(token) for token in range(TOKENS)] == np.searchsorted(held, np.arange(TOKENS)).tolist()


@given(CONTEXTS, CONTEXTS)
def test_shares_meet_where_both_hold_a_token(one: tuple[int, int], other: tuple[int, int]) -> None:
    """Two sizes, interleaves that do not divide each other: found by counting."""
    for share in _shares(one):
        held = set(np.flatnonzero(share.holds(np.arange(1000))).tolist())
        for theirs in _shares(other):
            common = held & set(np.flatnonzero(theirs.holds(np.arange(1000))).tolist())
            assert share.meets(theirs) == theirs.meets(share) == bool(common)


@given(CONTEXTS, st.integers(1, 12))
def test_what_lies_between_two_steps_is_of_one_block_and_one_share(context: tuple[int, int], block: int) -> None:
    """So that a read may be cut there, and nowhere else."""
    for share in _shares(context):
        step = share.step(block)
        for start in range(0, TOKENS, step):
            tokens = np.arange(start, start + step)
            held = share.holds(tokens)
            assert held.all() or not held.any()
            if held.all():
                places = share.place(tokens)
                assert places.tolist() == list(range(places[0], places[0] + step))
                assert places[0] // block == places[-1] // block


@given(CONTEXTS, st.integers(1, 12))
def test_a_share_is_consecutive_where_blocks_hold_runs(context: tuple[int, int], block: int) -> None:
    for share in _shares(context):
        blocks = np.array(_held(share)[: TOKENS // 5 // block * block]).reshape(-1, block)
        runs = bool((np.diff(blocks, axis=1) == 1).all())
        assert share.consecutive(block) == runs
