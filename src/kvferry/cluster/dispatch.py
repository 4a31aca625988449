"""The two legs of a disaggregated request, exactly as vllm-router sends them in its NIXL mode.

The prefill leg asks for one token with `PREFILL_PARAMETERS`; the ``kv_transfer_params`` of its answer go verbatim into
the decode leg. Both legs carry the same request id.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import httpx

from kvferry.errors import DispatchError

PREFILL_PARAMETERS: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
RANK_HEADER = "X-data-parallel-rank"
DEADLINE_S = 120.0

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Completion:
    """An answer: its tokens, and for each position the likeliest tokens with their log probabilities."""

    tokens: tuple[int, ...]
    text: str
    candidates: tuple[Mapping[int, float], ...]
    kv_transfer_params: Any
    prompt_tokens: int

    @classmethod
    def from_reply(cls, reply: Mapping[str, Any]) -> Self:
        """Read a reply of ``/v1/completions`` that was asked for token ids.

        Raises:
            DispatchError: it is not such a reply.
        """
        try:
            choice = reply["choices"][0]
            return cls(
                tokens=tuple(choice["token_ids"]),
                text=choice["text"],
                candidates=tuple(map(_by_token_id, (choice.get("logprobs") or {}).get("top_logprobs") or ())),
                kv_transfer_params=reply.get("kv_transfer_params"),
                prompt_tokens=reply["usage"]["prompt_tokens"],
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise DispatchError(f"not a completion with token ids ({error!r}): {str(reply)[:200]}") from error


def _by_token_id(candidates: Mapping[str, float]) -> dict[int, float]:
    return {int(token.removeprefix("token_id:")): value for token, value in candidates.items()}


@dataclass(frozen=True)
class Legs:
    """The answers of both legs of one request, and the id they went under."""

    request_id: str
    prefill: Completion
    decode: Completion


@dataclass(frozen=True)
class Sampling:
    """Greedy by default, so that two engines can be compared; `logprobs` candidates are returned per position."""

    max_tokens: int = 8
    logprobs: int = 2

    def body(self, model: str, prompt: Prompt) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": self.max_tokens,
            "min_tokens": self.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "logprobs": self.logprobs,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "stream": False,
        }


class Dispatcher:
    """Sends requests to instances; one dispatcher may be used by several threads.

    Raises, from every method that sends:
        DispatchError: an instance answered with an error, not at all, or not within `deadline_s` seconds.
    """

    def __init__(
        self, model: str = "model", deadline_s: float = DEADLINE_S, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._model = model
        # Every request connects anew: vLLM's servers close a connection that was idle for 5 s, httpx keeps it for as
        # long, and a request sent in that moment is lost.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(timeout=deadline_s, transport=transport, limits=limits, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def complete(
        self, url: str, prompt: Prompt, sampling: Sampling = Sampling(), rank: int | None = None, **more: Any
    ) -> Completion:
        """One request to one instance, at its data parallel rank `rank` if given; `more` goes into the body."""
        return self._post(url, {**sampling.body(self._model, prompt), **more}, _headers(uuid.uuid4().hex, rank))

    def prefill(
        self,
        url: str,
        prompt: Prompt,
        request_id: str,
        rank: int | None = None,
        parameters: Mapping[str, Any] = PREFILL_PARAMETERS,
    ) -> Completion:
        """The first leg: compute the prompt, hold its KV cache, say where it is."""
        body = {**Sampling(max_tokens=1).body(self._model, prompt), "kv_transfer_params": dict(parameters)}
        return self._post(url, body, _headers(request_id, rank))

    def decode(
        self,
        url: str,
        prompt: Prompt,
        request_id: str,
        parameters: Any,
        sampling: Sampling = Sampling(),
        rank: int | None = None,
    ) -> Completion:
        """The second leg: fetch what `parameters` name, and generate."""
        body = {**sampling.body(self._model, prompt), "kv_transfer_params": parameters}
        return self._post(url, body, _headers(request_id, rank))

    def both_legs(
        self,
        prefill_url: str,
        decode_url: str,
        prompt: Prompt,
        sampling: Sampling = Sampling(),
        prefill_rank: int | None = None,
        decode_rank: int | None = None,
    ) -> Legs:
        """Both legs of one request."""
        request_id = router_request_id(prefill_url, decode_url)
        first = self.prefill(prefill_url, prompt, request_id, prefill_rank)
        second = self.decode(decode_url, prompt, request_id, first.kv_transfer_params, sampling, decode_rank)
        return Legs(request_id, first, second)

    def _post(self, url: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Completion:
        try:
            answer = self._client.post(f"{url}/v1/completions", json=body, headers=headers)
        except httpx.TimeoutException as error:
            raise DispatchError(f"{url} did not answer within {self._client.timeout.read:.0f} s") from error
        except httpx.TransportError as error:
            raise DispatchError(f"{url} did not answer: {error}") from error
        if answer.status_code != httpx.codes.OK:
            raise DispatchError(f"{url} answered {answer.status_code}: {answer.text[:300]}")
        return Completion.from_reply(_json(answer))


def _json(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError as error:
        raise DispatchError(f"{answer.url} answered with something that is not JSON: {answer.text[:100]!r}") from error


def _headers(request_id: str, rank: int | None) -> dict[str, str]:
    headers = {"X-Request-Id": request_id}
    return headers if rank is None else {**headers, RANK_HEADER: str(rank)}


def router_request_id(prefill_url: str, decode_url: str) -> str:
    """A fresh request id in the form that vllm-router gives both legs."""
    prefill, decode = (httpx.URL(url).netloc.decode() for url in (prefill_url, decode_url))
    return f"___prefill_addr_{prefill}___decode_addr_{decode}_{uuid.uuid4().hex}"
