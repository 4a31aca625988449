"""A running request is watched in quiet, and while prompts come."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from kvferry.bench.serve.client import RefusedError, Target
from kvferry.bench.serve.result import Stall, Watched
from kvferry.bench.serve.stalling import stalls

RUNNING, PULLED = [1, 2, 3], [9] * 20
PACE_S = 0.005
STALL_S = 0.08
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _engine(stalling: bool, broken: bool = False, late: bool = False) -> Handler:
    """Gives a token every few milliseconds, and if `stalling` none while a prompt is taken in.

    Before that the running request gets two tokens, and if the prompt's own is `late` two more before that.
    """
    free, given = asyncio.Event(), asyncio.Event()
    free.set()

    async def two_tokens() -> None:
        for _ in range(2):
            given.clear()
            await given.wait()

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if broken:
            return web.Response(status=500, text="no")
        response = web.StreamResponse()
        await response.prepare(request)
        if body["prompt"] == PULLED:
            await two_tokens()
            if stalling:
                free.clear()
            await asyncio.sleep(STALL_S)
            free.set()
            if late:
                await two_tokens()
            await response.write(b'data: {"choices": [{"text": "x"}]}\n\n')
            return response
        while True:
            await asyncio.sleep(PACE_S)
            await free.wait()
            await response.write(b'data: {"choices": [{"text": "x"}]}\n\n')
            given.set()

    return handle


def _watch(stalling: bool, broken: bool = False, late: bool = False) -> list[Watched]:
    found: list[Watched] = []

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", _engine(stalling, broken, late))
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        target = Target(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}")
        try:
            async for watched in stalls(target, RUNNING, PULLED, Stall(20, 0.3, 2), 1000):
                found.append(watched)
        finally:
            await runner.cleanup()

    asyncio.run(asyncio.wait_for(run(), 30))
    return found


def test_an_engine_that_stands_still_is_seen_to() -> None:
    for watched in _watch(stalling=True):
        assert max(watched.busy_itl_s) >= STALL_S
        assert len(watched.quiet_itl_s) > 5
        assert 1 <= len(watched.pulls_s) <= 4
        assert watched.failed == 0


def test_the_step_that_gives_a_prompts_token_is_told_from_those_before() -> None:
    for watched in _watch(stalling=True):
        assert max(watched.between_itl_s) < STALL_S
        left_out = len(watched.busy_itl_s) - len(watched.between_itl_s)
        assert len(watched.pulls_s) - 1 <= left_out <= len(watched.pulls_s)  # the last may come after the watching
    for watched in _watch(stalling=True, late=True):  # stood still for something else than that token
        assert max(watched.between_itl_s) >= STALL_S


def test_prompts_are_sent_one_after_the_other() -> None:
    for watched in _watch(stalling=False):
        assert all(seconds >= STALL_S for seconds in watched.pulls_s)
        assert len(watched.busy_itl_s) > len(watched.pulls_s)


def test_a_request_that_is_refused_ends_the_watching() -> None:
    with pytest.raises(RefusedError, match="500: no"):
        _watch(stalling=False, broken=True)
