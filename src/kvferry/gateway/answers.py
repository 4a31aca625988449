"""What must change in an engine's answer before the client sees it, and how several answers become one.

As with requests, only what must change is taken apart; all other values stay the engine's own bytes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from kvferry.gateway.bodies import Body, Endpoint, encode, object_in

_decode = msgspec.json.Decoder(Body).decode
_decode_list = msgspec.json.Decoder(list[Body]).decode

NOTHING = Raw(b"null")
DONE = b"data: [DONE]\n\n"
MAX_EVENT_BYTES = 16 << 20


class BrokenAnswerError(Exception):
    """An instance's answer is not what it must be, or ended before it was finished."""


def answer_object(raw: bytes) -> Body:
    """An engine's answer, taken apart at the top level.

    Raises:
        BrokenAnswerError: it is no JSON object.
    """
    try:
        return _decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BrokenAnswerError("answered with something that is not a JSON object") from error


def cached_tokens(endpoint: Endpoint, answer: Body) -> Raw:
    """What a prefill instance's answer says was cached, as it says it."""
    usage = bytes(answer.get("usage", NOTHING))
    return _decode(usage).get(endpoint.cached, NOTHING) if usage[:1] == b"{" else NOTHING


def corrected(endpoint: Endpoint, answer: Body, cached: Raw | None) -> Body:
    """The answer as a plain engine would have given it: without transfer parameters, and with the cached tokens of the
    prefill instance in its usage (to decode, all that was transferred counts as cached). ``cached`` is None where there
    was no prefill leg.
    """
    if "kv_transfer_params" in answer:
        answer["kv_transfer_params"] = NOTHING
    said = cached_tokens(endpoint, answer)
    if cached is not None and bytes(cached)[:1] == bytes(said)[:1] == b"{":
        # A stream leaves out what is null, an answer at once does not.
        known = _decode(said)
        details = {key: value for key, value in _decode(cached).items() if key in known or bytes(value) != b"null"}
        answer["usage"] = Raw(encode({**_decode(answer["usage"]), endpoint.cached: details}))
    return answer


async def whole_events(endpoint: Endpoint, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Cut a stream at the ends of events.

    Raises:
        BrokenAnswerError: it ended before its last event.
    """
    rest, finished = b"", False
    async for piece in pieces:
        rest += piece
        cut = rest.rfind(b"\n\n") + 2
        if cut > 1:
            events, rest = rest[:cut], rest[cut:]
            finished = finished or endpoint.last_event.search(events) is not None
            yield events
        elif len(rest) > MAX_EVENT_BYTES:
            raise BrokenAnswerError("sent an event without an end")
    if not finished:
        raise BrokenAnswerError("ended its answer before it was finished")


def error_in(events: bytes) -> dict[str, Any] | None:
    """The error object of the first of these events, if it is one."""
    first = events.partition(b"\n\n")[0].partition(b"data: ")[2]
    if b'"error"' not in first[:200]:
        return None
    found = object_in(first)
    error = found.get("error", found if found.get("type") == "error" else None)
    return error if isinstance(error, dict) else None


class Merge:
    """Turns the answers to the prompts of one request into the one answer to it. Of a single prompt's answer only what
    ``corrected`` corrects is changed.

    Args:
        request_id: of the client's request; part ``k`` of several went under ``part_id(request_id, k)``.
        choices: for each prompt.
        cached: for each prompt, see ``corrected``.
    """

    def __init__(self, endpoint: Endpoint, request_id: str, choices: int, cached: Sequence[Raw | None]) -> None:
        self._endpoint, self._request_id, self._choices, self._cached = endpoint, request_id, choices, cached
        self._several = len(cached) > 1
        self._created: Raw | None = None
        self._usage: list[Body] = []

    def answers(self, parts: Sequence[Body]) -> bytes:
        """Not streamed: all at once."""
        merged = [self._in_place(part, answer) for part, answer in enumerate(parts)]
        if not self._several:
            return encode(merged[0])
        choices = [choice for answer in merged for choice in _decode_list(answer["choices"])]
        return encode({**merged[0], "choices": choices, "usage": _sum([one for one in merged if "usage" in one])})

    def events(self, part: int, events: bytes) -> bytes:
        """Streamed: what to pass on of a piece of one part."""
        if not self._several and (self._cached[0] is None or self._endpoint.cached.encode() not in events):
            return events
        return b"".join(self._event(part, event) for event in events.split(b"\n\n") if event)

    def end(self) -> bytes:
        """Streamed: what is left to say when all parts have ended."""
        if not self._several or not self._usage:
            return DONE if self._several else b""
        return b"data: " + encode({**self._usage[-1], "usage": _sum(self._usage)}) + b"\n\n" + DONE

    def _event(self, part: int, event: bytes) -> bytes:
        name, mark, data = event.partition(b"data: ")
        if data[:1] != b"{":
            return b"" if self._several and data == b"[DONE]" else event + b"\n\n"
        answer = _decode(data)
        if self._endpoint.named_events and "response" in answer:
            answer["response"] = Raw(encode(corrected(self._endpoint, _decode(answer["response"]), self._cached[part])))
        answer = self._in_place(part, answer)
        if self._several and "usage" in answer and bytes(answer.get("choices", b"")) == b"[]":
            self._usage.append(answer)
            return b""
        return name + mark + encode(answer) + b"\n\n"

    def _in_place(self, part: int, answer: Body) -> Body:
        """An answer to one prompt with the id, time and choice numbers it has among all."""
        answer = corrected(self._endpoint, answer, self._cached[part])
        if not self._several or not {"choices", "id", "created"} <= answer.keys():
            return answer
        choices = _decode_list(answer["choices"])
        for choice in choices:
            choice["index"] = Raw(encode(part * self._choices + msgspec.json.decode(choice["index"], type=int)))
        self._created = self._created or answer["created"]
        mine, theirs = self._request_id.encode(), part_id(self._request_id, part).encode()
        name = Raw(bytes(answer["id"]).replace(theirs, mine, 1))
        return {**answer, "id": name, "created": self._created, "choices": Raw(encode(choices))}


def part_id(request_id: str, part: int) -> str:
    return f"{request_id}.{part}"


def _sum(answers: Sequence[Body]) -> dict[str, Any]:
    """Tokens add up; what else there is in a usage comes from the last prompt, as vLLM has it."""
    usages = [object_in(answer["usage"]) for answer in answers]
    total = dict(usages[-1]) if usages else {}
    for key in {"prompt_tokens", "completion_tokens", "total_tokens"} & total.keys():
        total[key] = sum(usage.get(key) or 0 for usage in usages)
    return total
