"""Many seeds, one after the other or on several cores."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from .scenario import Result, simulate

CHUNK = 20


def attempt(seed: int) -> tuple[int, Result | str]:
    """A seed with what it came to, or with what went wrong and how to see it again.

    An exception that is no violation of a rule is a failure of the simulation or of what runs in it all the same.
    """
    try:
        return seed, simulate(seed)
    except Exception as error:
        return seed, f"seed {seed}: {type(error).__name__}: {error}\nreplay it: {replay(seed)}"


def replay(seed: int) -> str:
    return f"python -m tests.simulation --seed {seed}"


@contextmanager
def attempts(seeds: Iterable[int], jobs: int) -> Iterator[Iterator[tuple[int, Result | str]]]:
    """Every seed with its result, in any order; no process is left behind."""
    if jobs == 1:
        yield map(attempt, seeds)
        return
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield pool.imap_unordered(attempt, seeds, CHUNK)
