"""Whether a running request notices that long prompts arrive."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Container, Sequence
from itertools import pairwise

import aiohttp

from kvferry.bench.serve.client import Target, ask, pieces, session
from kvferry.bench.serve.result import Answer, Stall, Watched

SETTLE_TOKENS = 5
"""Of the running request, before it is watched."""
BREAK_OFF_S = 60.0


async def stalls(
    target: Target, running: Sequence[int], pulled: Sequence[int], stall: Stall, longest: int
) -> AsyncIterator[Watched]:
    """Watch a request, `turns` times: quiet for `seconds`, then while `pulled` is asked for again and again.

    Args:
        running: the prompt of the watched request.
        longest: tokens that it may be asked for.
    """
    async with session() as using:
        for _ in range(stall.turns):
            yield await _turn(using, target, running, pulled, stall, longest)


async def _turn(
    using: aiohttp.ClientSession,
    target: Target,
    running: Sequence[int],
    pulled: Sequence[int],
    stall: Stall,
    longest: int,
) -> Watched:
    times: list[float] = []
    going = asyncio.Event()

    async def stream() -> None:
        async for piece in pieces(using, target, running, longest):
            if piece.choices:
                times.append(time.perf_counter())
                if len(times) > SETTLE_TOKENS:
                    going.set()

    watching = asyncio.create_task(stream())
    try:
        await _first(watching, going)
        quiet_from = time.perf_counter()
        await asyncio.sleep(stall.seconds)
        busy_from = time.perf_counter()
        answers = await _pull(using, target, pulled, lambda: time.perf_counter() - busy_from < stall.seconds)
        until = time.perf_counter()
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await watching
    good = {began + answer.ttft_s: answer for began, answer in answers if not answer.error}
    shared = {_nearest(times, moment) for moment in good}
    return Watched(
        quiet_itl_s=_between(times, quiet_from, busy_from),
        busy_itl_s=_between(times, busy_from, until),
        pulls_s=tuple(answer.ttft_s for answer in good.values()),
        failed=len(answers) - len(good),
        between_itl_s=_between(times, busy_from, until, shared),
    )


async def _first(watching: asyncio.Task[None], going: asyncio.Event) -> None:
    """Raises what ended the watched request before it began, or ``TimeoutError``."""
    waiting = asyncio.create_task(going.wait())
    await asyncio.wait({watching, waiting}, timeout=BREAK_OFF_S, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if watching.done():
        watching.result()
    if not going.is_set():
        raise TimeoutError(f"the running request gave no tokens within {BREAK_OFF_S:.0f} s")


async def _pull(
    using: aiohttp.ClientSession, target: Target, prompt: Sequence[int], more: Callable[[], bool]
) -> list[tuple[float, Answer]]:
    """Each answer with the time at which it was asked for."""
    answers: list[tuple[float, Answer]] = []
    while more():
        began = time.perf_counter()
        answers.append((began, await ask(using, target, prompt, 1, began)))
        if answers[-1][1].error:
            await asyncio.sleep(0.1)
    return answers


def _nearest(times: Sequence[float], moment: float) -> float:
    """The running request's token of the same step: an engine hands out all tokens of a step at once."""
    return min(times, key=lambda each: abs(each - moment))


def _between(times: Sequence[float], begin: float, end: float, but: Container[float] = ()) -> tuple[float, ...]:
    """Latencies of the tokens that came in a time, `but` for some."""
    return tuple(late - early for early, late in pairwise(times) if begin < late <= end and late not in but)
