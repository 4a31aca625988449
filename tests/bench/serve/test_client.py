"""What is timed, and what counts as an answer."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from kvferry.bench.serve.client import Target, drive
from kvferry.bench.serve.result import Answer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _event(**said: Any) -> bytes:
    return b"data: " + json.dumps(said).encode() + b"\n\n"


def _token(text: str = "a") -> bytes:
    return _event(choices=[{"text": text}])


def _streaming(*parts: bytes, seen: list[Any] | None = None) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if seen is not None:
            seen.append((request.url.port, body, request.headers.get("X-Request-Id")))
        if not body.get("stream"):
            return web.json_response({"choices": [{"text": "x"}]})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
        return response

    return handle


def _drive(handler: Handler, prompts: int = 1, concurrency: int | None = None, first: bool = False) -> list[Answer]:
    answers: list[Answer] = []

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        sites = [web.TCPSite(runner, "127.0.0.1", 0) for _ in range(2)]
        for site in sites:
            await site.start()
        urls = [f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}" for site in sites]
        try:
            target = Target(urls[0], urls[1] if first else None)
            await drive(target, [[1, 2]] * prompts, 3, [0.0] * prompts, concurrency, answers.append)
        finally:
            await runner.cleanup()

    asyncio.run(asyncio.wait_for(run(), 30))
    return answers


USAGE = _event(choices=[], usage={"completion_tokens": 7})
DONE = b"data: [DONE]\n\n"


def test_times_are_of_pieces_with_a_choice() -> None:
    """Neither a comment nor the usage is one."""
    [answer] = _drive(_streaming(b": ping\n\n", _token("a"), _token(""), _token("b"), USAGE, DONE))
    assert answer.error == ""
    assert len(answer.itl_s) == 2
    assert answer.output_tokens == 7
    assert answer.latency_s == pytest.approx(answer.ttft_s + sum(answer.itl_s))


def test_pieces_are_found_wherever_the_bytes_are_cut() -> None:
    whole = _token("a") + _token("b") + USAGE + DONE
    [answer] = _drive(_streaming(whole[:9], whole[9:40], whole[40:]))
    assert (len(answer.itl_s), answer.output_tokens) == (1, 7)


def test_without_usage_pieces_are_counted() -> None:
    [answer] = _drive(_streaming(_token(), _token(), DONE))
    assert answer.output_tokens == 2


def test_texts_can_be_told_apart() -> None:
    texts = [_drive(_streaming(*map(_token, text), DONE))[0].digest for text in ("ab", "ab", "ac")]
    assert texts[0] == texts[1] != texts[2]


async def _refusing(request: web.Request) -> web.StreamResponse:
    return web.Response(status=503, text="no instance")


async def _cutting(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(_token())
    assert request.transport
    request.transport.close()
    return response


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (_refusing, "503: no instance"),
        (_cutting, "ClientPayloadError"),
        (_streaming(DONE), "without a token"),
        (_streaming(_token(), _event(error={"message": "the load failed"})), "the load failed"),
        (_streaming(b"data: {nonsense\n\n"), "DecodeError"),
        (_streaming(_event(choices=5)), "ValidationError"),
    ],
    ids=["status", "cut", "empty", "error", "json", "shape"],
)
def test_what_is_no_answer_is_a_failure_with_its_reason(handler: Handler, said: str) -> None:
    [answer] = _drive(handler)
    assert said in answer.error


def test_where_nothing_is_in_front_prefill_is_asked_first() -> None:
    """For one token, under the same id."""
    seen: list[Any] = []
    _drive(_streaming(_token(), DONE, seen=seen), first=True)
    (first_port, first, first_id), (second_port, second, second_id) = seen
    assert first_port != second_port
    assert (first["max_tokens"], first.get("stream")) == (1, None)
    assert (second["max_tokens"], second["stream"]) == (3, True)
    assert first["prompt"] == second["prompt"]
    assert first_id == second_id


@pytest.mark.parametrize(("concurrency", "most"), [(2, 2), (None, 6)])
def test_no_more_are_under_way_than_may_be(concurrency: int | None, most: int) -> None:
    under_way, peak, full = 0, 0, asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal under_way, peak
        under_way += 1
        peak = max(peak, under_way)
        if under_way == most:
            full.set()
        await full.wait()
        await asyncio.sleep(0.05)  # for one that must not come
        under_way -= 1
        return await _streaming(_token(), DONE)(request)

    answers = _drive(handle, prompts=6, concurrency=concurrency)
    assert peak == most
    assert sorted(answer.number for answer in answers) == list(range(6))
