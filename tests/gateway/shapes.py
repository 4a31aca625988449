"""What vLLM's answers look like, for each of its endpoints that generate; the words are a function of the prompt."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .standin import StandIn


def word(prompt: str, choice: int, step: int) -> str:
    return f" w{zlib.crc32(f'{prompt}/{choice}/{step}'.encode()) % 1000}"


class Shape:
    """What all three endpoints have in common."""

    prefix = ""
    created = 1_700_000_000

    def __init__(self, engine: StandIn, headers: dict[str, str], body: dict, remote: bool) -> None:
        self.engine, self.body = engine, body
        self.id = f"{self.prefix}{headers.get('x-request-id', 'none')}"
        self.n = int(body.get("n") or 1)
        self.prompts = self._prompts()
        limit = body.get("max_completion_tokens") or body.get("max_output_tokens") or body.get("max_tokens")
        self.limit = limit or engine.max_tokens_default
        if not isinstance(self.limit, int) or not 0 < self.limit <= 1000 or not 0 < self.n <= 100:
            raise ValueError
        self.remote = remote

    def _prompts(self) -> list[str]:
        return [json.dumps(self.body.get("messages") or self.body.get("input"))]

    def words(self, prompt: str, choice: int) -> list[str]:
        return [word(prompt, choice, step) for step in range(self.limit)]

    def prompt_tokens(self, prompt: str) -> int:
        return len(prompt) // 4 + 1

    def usage(self) -> dict[str, Any]:
        tokens = [self.prompt_tokens(prompt) for prompt in self.prompts]
        made = self.limit * self.n * len(self.prompts)
        cached = tokens[-1] if self.remote else tokens[-1] // 2
        return {
            "prompt_tokens": sum(tokens),
            "total_tokens": sum(tokens) + made,
            "completion_tokens": made,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def choices(self) -> Iterator[tuple[int, list[str]]]:
        for at, prompt in enumerate(self.prompts):
            for choice in range(self.n):
                yield at * self.n + choice, self.words(prompt, choice)

    def envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.body.get("model")}

    def whole(self, hold: bool) -> dict[str, Any]:
        parameters = self.engine.hold(self.body) if hold else None
        answer = {**self.envelope(self.kind), "choices": [self.choice(*one) for one in self.choices()]}
        return {**answer, "usage": self.usage(), "kv_transfer_params": parameters, "temperature_seen": self._echoed()}

    def _echoed(self) -> Any:
        return self.body.get("temperature")

    kind = chunk_kind = ""

    def choice(self, index: int, words: list[str]) -> dict[str, Any]:
        raise NotImplementedError

    def delta(self, index: int, words: list[str], step: int) -> dict[str, Any]:
        raise NotImplementedError

    def events(self) -> Iterator[bytes]:
        options = self.body.get("stream_options") or {}
        for index, words in self.choices():
            for step in range(len(words)):
                chunk = {**self.envelope(self.chunk_kind), "choices": [self.delta(index, words, step)]}
                yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
        if options.get("include_usage"):
            chunk = {**self.envelope(self.chunk_kind), "choices": [], "usage": self.usage()}
            yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"


class Completions(Shape):
    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def _prompts(self) -> list[str]:
        prompt = self.body["prompt"]
        several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        return [json.dumps(one) for one in (prompt if several else [prompt])]

    def choice(self, index: int, words: list[str]) -> dict[str, Any]:
        text = "".join(words)
        if self.body.get("echo"):
            text = self.prompts[index // self.n] + text
        logprobs = {"token_logprobs": [-0.1] * len(words)} if self.body.get("logprobs") else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": "length"}

    def delta(self, index: int, words: list[str], step: int) -> dict[str, Any]:
        return {"index": index, "text": words[step], "finish_reason": "length" if step == len(words) - 1 else None}


class Chat(Shape):
    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def words(self, prompt: str, choice: int) -> list[str]:
        if (self.body.get("response_format") or {}).get("type") == "json_schema":
            return ['{"answer":', ' "yes"}']
        return super().words(prompt, choice)

    def choice(self, index: int, words: list[str]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(words)}
        if self.body.get("tools"):
            call = {"name": self.body["tools"][0]["function"]["name"], "arguments": '{"city": "Paris"}'}
            message["tool_calls"] = [{"id": "call_1", "type": "function", "function": call}]
        return {"index": index, "message": message, "logprobs": None, "finish_reason": "stop"}

    def delta(self, index: int, words: list[str], step: int) -> dict[str, Any]:
        delta = {"content": words[step], **({"role": "assistant"} if step == 0 else {})}
        return {"index": index, "delta": delta, "finish_reason": "stop" if step == len(words) - 1 else None}


class Responses(Shape):
    prefix = "resp_"

    def usage(self) -> dict[str, Any]:
        usage = super().usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }

    def response(self, status: str, parameters: Any = None) -> dict[str, Any]:
        text = {"type": "output_text", "text": "".join(self.words(self.prompts[0], 0)), "annotations": []}
        message = {"id": "msg_1", "type": "message", "role": "assistant", "status": status, "content": [text]}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.body.get("model"),
            "output": [message] if status == "completed" else [],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": self.usage() if status == "completed" else None,
            "kv_transfer_params": parameters,
        }

    def whole(self, hold: bool) -> dict[str, Any]:
        return self.response("completed", self.engine.hold(self.body) if hold else None)

    def events(self) -> Iterator[bytes]:
        def event(kind: str, **fields: Any) -> bytes:
            return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()

        yield event("response.created", sequence_number=0, response=self.response("in_progress"))
        for step, piece in enumerate(self.words(self.prompts[0], 0)):
            place = {"item_id": "msg_1", "output_index": 0, "content_index": 0, "logprobs": []}
            yield event("response.output_text.delta", sequence_number=step + 1, delta=piece, **place)
        yield event("response.completed", sequence_number=99, response=self.response("completed"))


SHAPES: dict[str, type[Shape]] = {
    "/v1/completions": Completions,
    "/v1/chat/completions": Chat,
    "/v1/responses": Responses,
}
