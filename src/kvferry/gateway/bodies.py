"""What must change in a request's body for each leg; everything else stays as the client wrote it.

Only the top level of a body is taken apart. The values stay the client's own bytes, so no number is encoded anew, no
key is dropped, and a key that stands there twice counts as the engines count it: the last one.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw

from kvferry.gateway.errors import ApiError

Body = dict[str, Raw]

_decode = msgspec.json.Decoder(Body).decode
_decode_list = msgspec.json.Decoder(list[Raw]).decode
encode = msgspec.json.Encoder().encode

TRANSFER_KEYS = ("kv_transfer_params", "ec_transfer_params")
"""Where a connector reads which other machine to talk to. Never a client's to say."""

PREFILL_PARAMETERS = Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
    b'"remote_host":null,"remote_port":null}'
)
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
BYTES_PER_TOKEN = 4
AFFINITY_BYTES = 1024
MAX_PARTS = 256
_ONE, _FALSE = Raw(b"1"), Raw(b"false")


@dataclass(frozen=True)
class Endpoint:
    """What the gateway must know of one of the engines' routes.

    Attributes:
        prompt: the key of what is prefilled.
        for_prefill: what makes an answer short, single and whole.
        not_for_prefill: keys that matter to an answer that is thrown away, or that do not go with one token. What the
            prompt is made of, or could be refused for, is not among them.
        last_event: without it a stream is not finished.
        cached: where an answer's usage says what was cached.
        named_events: its stream is of the Responses API, whose events have names.
    """

    path: str
    prompt: str
    for_prefill: Mapping[str, Raw]
    not_for_prefill: tuple[str, ...]
    last_event: re.Pattern[bytes] = re.compile(rb"data: \[DONE\]\n\n\Z")
    cached: str = "prompt_tokens_details"
    named_events: bool = False


_UNUSED = ("stream_options", "min_tokens", "logprobs", "top_logprobs", "logprob_token_ids", "return_token_ids")
_SHORT = {"max_tokens": _ONE, "n": _ONE, "stream": _FALSE}
COMPLETIONS = Endpoint("/v1/completions", "prompt", _SHORT, (*_UNUSED, "echo"))
CHAT = Endpoint("/v1/chat/completions", "messages", _SHORT | {"max_completion_tokens": _ONE}, (*_UNUSED, "echo"))
RESPONSES = Endpoint(
    "/v1/responses",
    "input",
    {"max_output_tokens": _ONE, "store": _FALSE, "stream": _FALSE},
    (*_UNUSED, "store", "include", "background"),
    re.compile(rb"^event: response\.(?:completed|incomplete|failed)\b", re.MULTILINE),
    "input_tokens_details",
    named_events=True,
)
ENDPOINTS = (COMPLETIONS, CHAT, RESPONSES)


def parse(raw: bytes) -> Body:
    """A client's body without what clients may not send.

    Raises:
        ApiError: 400, it is no JSON object.
    """
    try:
        raw.decode()
        body = _decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not a JSON object: {error}") from None
    for key in TRANSFER_KEYS:
        body.pop(key, None)
    if "vllm_xargs" in body:
        # vLLM puts these where it puts the transfer parameters. Where they are no object, the engine says so.
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            kept = {key: value for key, value in _decode(body["vllm_xargs"]).items() if key not in TRANSFER_KEYS}
            body["vllm_xargs"] = Raw(encode(kept))
    return body


def prefill_body(endpoint: Endpoint, body: Body, parameters: Raw = PREFILL_PARAMETERS) -> bytes:
    """The same prompt for one token, to be held for whoever decodes."""
    leg = {key: value for key, value in body.items() if key not in endpoint.not_for_prefill}
    return encode({**leg, **endpoint.for_prefill, "kv_transfer_params": parameters})


def decode_body(body: Body, parameters: Raw | None) -> bytes:
    """The client's body with what the prefill instance answered."""
    return encode(body if parameters is None else {**body, "kv_transfer_params": parameters})


def whole_on_decode(endpoint: Endpoint, body: Body) -> str | None:
    """Why one instance must do all of a request, None when it can be done in two legs."""
    text = endpoint is COMPLETIONS
    # To vLLM a chat's echo means log probabilities of the prompt, whether or not any are asked for.
    echoed = given(body, "echo") and (endpoint is CHAT or (text and given(body, "logprobs")))
    if given(body, "prompt_logprobs") or echoed:
        return "prompt_logprobs"  # they come from computing the prompt
    if text and (given(body, "prompt_embeds") or integer(body.get("max_tokens")) == 0):
        return "prompt_only"
    if len(prompts(endpoint, body)) > MAX_PARTS:
        return "many_prompts"
    if given(body, "use_beam_search"):
        return "beam_search"
    if endpoint is RESPONSES and (given(body, "previous_response_id") or given(body, "background")):
        return "stored_response"  # its other half is in one instance's memory
    return None


def given(body: Body, key: str) -> bool:
    """Whether the client asked for it, unless the engine takes the value for nonsense."""
    return bytes(body.get(key, b"")) not in (b"", b"null", b"false")


def integer(raw: Raw | None, otherwise: int | None = None) -> int | None:
    """A value as engines read it: ``2``, ``2.0`` and ``"2"`` are all two."""
    try:
        return int(msgspec.json.decode(raw, type=int, strict=False)) if raw is not None else otherwise
    except msgspec.DecodeError:
        return otherwise


def prompts(endpoint: Endpoint, body: Body) -> list[Raw]:
    """The prompts of a request with several, else none."""
    raw = bytes(body.get("prompt", b""))
    if endpoint is not COMPLETIONS or raw[:1] != b"[" or raw[1:].lstrip()[:1] not in (b'"', b"["):
        return []
    found = _decode_list(raw)
    return found if len(found) > 1 else []


def prompt_tokens(endpoint: Endpoint, body: Body) -> int:
    """An estimate, for balancing: token ids are counted, of text four bytes make a token."""
    raw = bytes(body.get(endpoint.prompt, b""))
    if endpoint is COMPLETIONS and raw.lstrip(b"[ \n\t")[:1].isdigit():
        return raw.count(b",") + 1
    return len(raw) // BYTES_PER_TOKEN + 1


def answer_tokens(body: Body) -> int:
    """How long the answer may become, for balancing; a guess where the client did not say."""
    limit = next(filter(None, (integer(body.get(key)) for key in LIMITS)), 256)
    return max(1, limit) * (integer(body.get("n")) or 1)


def affinity_key(endpoint: Endpoint, body: Body) -> bytes:
    """Equal for prompts with an equal beginning, so that they meet the same prefix cache."""
    head = b"".join(memoryview(body[key])[:AFFINITY_BYTES] for key in ("tools", endpoint.prompt) if key in body)
    return hashlib.blake2b(head[:AFFINITY_BYTES], digest_size=16).digest()


def object_in(raw: bytes | Raw) -> Mapping[str, Any]:
    """A JSON object decoded whole; empty for anything else."""
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
