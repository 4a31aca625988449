"""Sends requests and takes the time, as ``vllm bench serve`` does (``async_request_openai_completions``)."""

import asyncio
import hashlib
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import aiohttp
import msgspec

from kvferry.bench.serve.result import Answer

MODEL = "model"
PATH = "/v1/completions"
LONGEST_LINE = 1 << 20
ANSWER_S = 600.0
KEEP_ALIVE_S = 2.0
"""vLLM's servers close an idle connection after 5 s, and a request sent in that moment is lost."""
ERROR_LENGTH = 200


@dataclass(frozen=True)
class Target:
    """Where requests go.

    Attributes:
        first: an engine that is to compute the prompt before ``url`` is asked, where nothing in front does that.
    """

    url: str
    first: str | None = None


class Piece(msgspec.Struct):
    """One event of a stream."""

    choices: list[dict[str, Any]] = []
    usage: dict[str, Any] | None = None
    error: Any = None


class RefusedError(Exception):
    """An answer that is none; its text says why."""


def session() -> aiohttp.ClientSession:
    """Without a bound on connections: how many requests are under way is for the load to say."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=ANSWER_S),
        read_bufsize=LONGEST_LINE,
        trust_env=False,
    )


async def pieces(
    using: aiohttp.ClientSession, target: Target, prompt: Sequence[int], max_tokens: int
) -> AsyncIterator[Piece]:
    """The events of one streamed answer.

    Raises:
        RefusedError: it was answered with an error.
        aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError: it was not answered, or with something else.
    """
    body = {"model": MODEL, "prompt": list(prompt), "temperature": 0.0, "ignore_eos": True}
    headers = {"X-Request-Id": uuid.uuid4().hex}
    if target.first is not None:
        async with using.post(target.first + PATH, json={**body, "max_tokens": 1}, headers=headers) as answer:
            await _require_well(answer)
            await answer.read()
    streamed = {**body, "max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True}}
    async with using.post(target.url + PATH, json=streamed, headers=headers) as answer:
        await _require_well(answer)
        async for line in answer.content:
            data = line.strip().removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                piece = msgspec.json.decode(data, type=Piece)
                if piece.error is not None:
                    raise RefusedError(str(piece.error)[:ERROR_LENGTH])
                yield piece


async def _require_well(answer: aiohttp.ClientResponse) -> None:
    if answer.status != 200:
        raise RefusedError(f"{answer.status}: {(await answer.text())[:ERROR_LENGTH]}")


async def ask(
    using: aiohttp.ClientSession, target: Target, prompt: Sequence[int], max_tokens: int, began: float, number: int = 0
) -> Answer:
    """One request; `began` is the ``time.perf_counter`` of its load. A failure is an answer with an error."""
    start = time.perf_counter()
    times: list[float] = []
    text = hashlib.sha256()
    tokens = None
    error = ""
    try:
        async for piece in pieces(using, target, prompt, max_tokens):
            if piece.choices:
                times.append(time.perf_counter())
                text.update((piece.choices[0].get("text") or "").encode())
            if piece.usage:
                tokens = piece.usage.get("completion_tokens")
    except (RefusedError, aiohttp.ClientError, TimeoutError, OSError, ValueError, msgspec.MsgspecError) as problem:
        error = f"{type(problem).__name__}: {problem}".rstrip(": ")
    if not times:
        return Answer(number, start - began, len(prompt), error=error or "an answer without a token")
    return Answer(
        number=number,
        start_s=start - began,
        prompt_tokens=len(prompt),
        ttft_s=times[0] - start,
        itl_s=tuple(late - early for early, late in pairwise(times)),
        latency_s=times[-1] - start,
        output_tokens=tokens or len(times),
        digest=text.hexdigest()[:16],
        error=error,
    )


async def drive(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    offsets: Sequence[float],
    concurrency: int | None,
    answered: Callable[[Answer], None],
) -> None:
    """Send prompts at their offsets, at most `concurrency` at a time; what waits for that is not yet sent."""
    room = asyncio.Semaphore(concurrency or len(prompts) or 1)
    async with session() as using, asyncio.TaskGroup() as group:
        began = time.perf_counter()

        async def one(number: int, prompt: Sequence[int]) -> None:
            async with room:
                answered(await ask(using, target, prompt, max_tokens, began, number))

        for number, (prompt, offset) in enumerate(zip(prompts, offsets, strict=True)):
            if (wait := began + offset - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            group.create_task(one(number, prompt))
