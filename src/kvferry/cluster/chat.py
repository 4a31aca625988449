"""One streamed chat answer from an OpenAI-compatible server."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from kvferry.errors import DispatchError

DEADLINE_S = 120.0  # between two pieces of an answer, the first included


@dataclass(frozen=True)
class Answer:
    """The text and the token ids of an answer."""

    text: str
    tokens: tuple[int, ...]


def ask(
    url: str, prompt: str, max_tokens: int, model: str = "model", show: Callable[[str], None] = lambda _: None
) -> Answer:
    """Ask greedily; `show` gets each piece of text as it arrives.

    Raises:
        DispatchError: the server answered with an error, not at all, or stopped in the middle.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "stream": True,
        "return_token_ids": True,
    }
    text, finished = "", False
    tokens: list[int] = []
    for choice in _choices(url, body):
        piece = choice.get("delta", {}).get("content") or ""
        show(piece)
        text += piece
        tokens += choice.get("token_ids") or []
        finished = finished or choice.get("finish_reason") is not None
    if not finished:
        raise DispatchError(f"{url} ended its answer before it was finished: {text!r}")
    return Answer(text, tuple(tokens))


def _choices(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    try:
        with (
            httpx.Client(timeout=DEADLINE_S, trust_env=False) as client,
            client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer,
        ):
            if answer.status_code != httpx.codes.OK:
                raise DispatchError(f"{url} answered {answer.status_code}: {answer.read().decode()[:300]}")
            for line in answer.iter_lines():
                yield from _choices_of_event(line)
    except httpx.TimeoutException as error:
        raise DispatchError(f"{url} sent nothing for {DEADLINE_S:.0f} s") from error
    except httpx.TransportError as error:
        raise DispatchError(f"{url} did not answer: {error}") from error


def _choices_of_event(line: str) -> list[dict[str, Any]]:
    """The choices in one line of a server-sent event stream."""
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data == "[DONE]":
        return []
    event = json.loads(data)
    if "error" in event:
        raise DispatchError(f"the answer broke off: {event['error']}")
    return list(event.get("choices") or ())
