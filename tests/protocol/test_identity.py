"""The identity of a prompt's KV cache."""

import itertools
import sys
import threading

from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.identity import draw, token_identity

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=50)


@given(TOKENS, TOKENS)
def test_two_prompts_share_an_identity_only_if_they_are_equal(one, two):
    assert (token_identity(one) == token_identity(two)) == (one == two)


def test_the_same_tokens_under_another_adapter_are_not_the_same_cache():
    assert token_identity([1, 2], ["lora:a"]) != token_identity([1, 2], ["lora:b"]) != token_identity([1, 2])


def test_extras_cannot_be_shifted_into_each_other():
    assert token_identity([1], ["ab", "c"]) != token_identity([1], ["a", "bc"])


def test_identity_does_not_depend_on_the_process():
    """Producer and consumer are different processes: Python's own hash would differ."""
    assert token_identity([1, 2, 3]) == "abccad42d03c940bc2b249bf5a4e1e3d"


def test_whoever_hashes_a_long_prompt_keeps_the_interpreter_meanwhile():
    """Else an engine's hook waits for it, up to a turn of 5 ms."""
    turns, stop = itertools.count(), threading.Event()

    def compete():
        while not stop.is_set():
            next(turns)

    def turns_lost() -> int:
        token_identity([1])  # takes the interpreter, if need be
        before = next(turns)
        token_identity(range(10_000))
        return next(turns) - before - 1

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=compete)
    thread.start()
    # The other one has a turn only if this one lets go by itself, or after so long, should the machine stand still.
    # Not longer: this one waits as long for each turn of its own.
    sys.setswitchinterval(0.05)
    try:
        lost = [turns_lost() for _ in range(5)]
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert 0 in lost


def test_names_are_128_random_bits():
    names = {draw() for _ in range(1000)}
    assert len(names) == 1000
    assert all(len(name) == 32 for name in names)
