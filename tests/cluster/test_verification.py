"""When two engines agree, when they are tied, and when nothing was moved."""

import pytest

from kvferry.cluster.dispatch import Completion
from kvferry.cluster.metrics import NO_HITS, PrefixHits
from kvferry.cluster.transfers import NOTHING_MOVED, Moved, Rank, Read, Transfer
from kvferry.cluster.verification import Verdict, compare, missing_transfer, ranks

BOUND = 1e-3


def _completion(*tokens: int, candidates: tuple[dict[int, float], ...] = ()) -> Completion:
    return Completion(tokens, "", candidates, None, 10)


def _moved(workers: int = 1, result: str = "held") -> Moved:
    reads = (Read(Rank(0, 0, 0), 4096, 1),)
    return Moved(tuple(Transfer("r", Rank(0, pp, 0), reads, 1.0, result) for pp in range(workers)))


def test_equal_tokens_are_equal() -> None:
    assert compare(_completion(1, 2), _completion(1, 2), BOUND) == (Verdict.EQUAL, "")


def test_two_candidates_closer_than_the_bound_are_a_tie() -> None:
    seen = ({1: -0.1}, {2: -1.0, 3: -1.0005})
    verdict, detail = compare(_completion(1, 2, candidates=seen), _completion(1, 3, candidates=seen), BOUND)
    assert verdict is Verdict.TIE
    assert "position 1" in detail


def test_two_candidates_further_apart_are_a_difference() -> None:
    seen = ({2: -1.0, 3: -1.5},)
    verdict, detail = compare(_completion(2, candidates=seen), _completion(3, candidates=seen), BOUND)
    assert verdict is Verdict.DIFFERENT
    assert "0.5 apart" in detail


def test_a_tie_must_be_one_for_both_engines() -> None:
    near, far = ({2: -1.0, 3: -1.0},), ({2: -4.0, 3: -1.0},)
    assert compare(_completion(2, candidates=near), _completion(3, candidates=far), BOUND)[0] is Verdict.DIFFERENT


def test_a_token_that_was_no_candidate_is_a_difference() -> None:
    seen = ({2: -1.0, 4: -1.0},)
    assert compare(_completion(2, candidates=seen), _completion(3, candidates=seen), BOUND)[0] is Verdict.DIFFERENT


def test_what_follows_a_tie_is_not_compared() -> None:
    seen = ({2: -1.0, 3: -1.0}, {7: 0.0}, {9: 0.0})
    one, other = _completion(2, 7, 9, candidates=seen), _completion(3, 8, 1, candidates=seen)
    assert compare(one, other, BOUND)[0] is Verdict.TIE


def test_a_shorter_answer_is_a_difference() -> None:
    assert compare(_completion(1, 2), _completion(1), BOUND)[0] is Verdict.DIFFERENT


def test_a_prompt_that_was_moved_passes() -> None:
    assert missing_transfer(10, PrefixHits(0, 10), _moved(2), workers=2) == ""


def test_the_last_token_need_not_be_moved() -> None:
    assert missing_transfer(10, PrefixHits(0, 9), _moved(), workers=1) == ""
    assert missing_transfer(1, NO_HITS, NOTHING_MOVED, workers=1) == ""


def test_tokens_in_the_local_prefix_cache_need_not_be_moved() -> None:
    assert missing_transfer(300, PrefixHits(256, 44), _moved(), workers=1) == ""


@pytest.mark.parametrize(
    ("hits", "moved", "said"),
    [
        (NO_HITS, NOTHING_MOVED, "0 of 9 tokens"),
        (PrefixHits(0, 5), _moved(2), "5 of 9 tokens"),
        (PrefixHits(0, 10), _moved(2, "the grant was gone"), "could not use what it read: the grant was gone"),
        (PrefixHits(0, 10), _moved(1), "1 of 2 workers"),
    ],
)
def test_a_prompt_that_was_computed_locally_is_found_out(hits: PrefixHits, moved: Moved, said: str) -> None:
    assert said in missing_transfer(10, hits, moved, workers=2)


def test_prompts_go_round_over_every_pair_of_ranks() -> None:
    assert {ranks(turn, 2, 3) for turn in range(6)} == {(p, d) for p in range(2) for d in range(3)}


def test_a_side_with_one_rank_is_not_told_a_rank() -> None:
    assert ranks(5, 1, 1) == (None, None)
