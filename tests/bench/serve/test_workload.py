"""The same prompts for every contender, and never one that is in a cache."""

from kvferry.bench.serve.result import Prompts
from kvferry.bench.serve.workload import prompts, tokens

ASKED = Prompts(count=5, input_len=40, output_len=8, prefix_len=7, burstiness=1.0, seed=3)


def test_a_seed_gives_the_same_prompts() -> None:
    assert prompts(ASKED, 384, 0, 1) == prompts(ASKED, 384, 0, 1)


def test_no_prompt_comes_twice_in_a_run() -> None:
    """Neither under a load, nor in another round, nor under another load."""
    seen = [tuple(one) for stream in ((0, 0), (0, 1), (1, 0), (1, 1), (2,)) for one in prompts(ASKED, 384, *stream)]
    assert len(set(seen)) == len(seen)


def test_all_begin_alike_where_that_is_asked_for() -> None:
    found = [*prompts(ASKED, 384, 0, 0), *prompts(ASKED, 384, 1, 0)]
    assert len({tuple(one[:7]) for one in found}) == 1
    assert len({one[7] for one in found}) > 1
    assert {len(one) for one in found} == {47}


def test_tokens_lie_in_the_vocabulary() -> None:
    assert set(tokens(5000, 8, 1)) == set(range(3, 8))
    assert set(tokens(50, 2, 1)) == {1}
