"""Pairs measured in turn, round after round, so that what the machine does meanwhile falls on all of them."""

from collections.abc import AsyncIterator

from kvferry.bench.transfer.pair import REPEATS, Sample, measure
from kvferry.bench.transfer.question import Question


def samples_expected(question: Question) -> int:
    """How many samples ``rounds`` gives."""
    return question.rounds * len(question.pairs) * len(question.tokens) * REPEATS


async def rounds(question: Question) -> AsyncIterator[Sample]:
    """Every sample as soon as it is there.

    Raises:
        TransferError: something did not work, or bytes were wrong.
    """
    for _ in range(question.rounds):
        for pair in question.pairs:
            async for sample in measure(question, pair):
                yield sample
