"""An instance's load, and the proof that a pair exchanges KV caches."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.cluster import pulse
from kvferry.cluster.allocation import Allocator, Member
from kvferry.cluster.dispatch import RANK_HEADER, Dispatcher
from kvferry.cluster.machine import Machine
from kvferry.cluster.manifest import parse
from kvferry.cluster.pulse import Load, Moved, Pulse, connect, look
from kvferry.errors import StartError

from .configs import GROUPED_QUERY

METRICS = """
vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_running{engine="1"} 1.0
vllm:num_requests_waiting{engine="0"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
"""


def test_the_load_is_that_of_all_ranks_and_the_cache_that_of_the_fullest() -> None:
    assert Load.parse(METRICS) == Load(3, 4, 0.5)
    assert not Load.parse(METRICS).idle
    assert Load.parse("").idle


@pytest.mark.parametrize(
    ("health", "expected"), [(200, Pulse(True, Load(3, 4, 0.5))), (503, Pulse(False, None)), (None, Pulse(None, None))]
)
def test_an_instance_is_well_unwell_or_silent(health: int | None, expected: Pulse) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if health is None:
            raise httpx.ReadTimeout("slow")
        return httpx.Response(health if request.url.path == "/health" else 200, text=METRICS)

    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        assert look(client, "http://h:1") == expected


class Pair:
    """Answers both legs; `moves` says whether the decode instance's counter grows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, counts: Iterator[Moved]) -> None:
        allocator = Allocator(
            parse({"model": "/m", "prefill": {"layout": "dp=2"}, "decode": {"layout": "dp=3"}}),
            Machine(True, ("0",)),
            Path("/m"),
            GROUPED_QUERY,
            Path("/secret"),
        )
        self.prefill, self.decode = allocator.all_members()
        self.ranks: list[tuple[str, str | None]] = []
        self.dispatcher = Dispatcher("m", transport=httpx.MockTransport(self._answer))
        monkeypatch.setattr(Moved, "read", lambda _: next(counts))
        monkeypatch.setattr(pulse, "SETTLE_S", 0.0)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        side = "prefill" if f":{request.url.port}" in self.prefill.spec.url else "decode"
        self.ranks.append((side, request.headers.get(RANK_HEADER)))
        prompt = json.loads(request.content)["prompt"]
        assert len(prompt) == pulse.PROBE_TOKENS
        assert all(0 < token < GROUPED_QUERY["vocab_size"] for token in prompt)
        choice: dict[str, Any] = {"token_ids": [1], "text": "a"}
        reply = {"choices": [choice], "usage": {"prompt_tokens": 96}, "kv_transfer_params": {"a": 1}}
        return httpx.Response(200, json=reply)

    def connect(self, prefill: Member, decode: Member) -> None:
        connect(self.dispatcher, prefill, decode, GROUPED_QUERY)


def test_every_rank_of_decode_reads_from_every_one_of_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch, (Moved(number, 0) for number in range(100)))
    pair.connect(pair.prefill, pair.decode)
    legs = list(zip(pair.ranks[::2], pair.ranks[1::2], strict=True))
    met = {(prefill[1], decode[1]) for prefill, decode in legs}
    assert met == {(str(p), str(d)) for p in range(2) for d in range(3)}


def test_bytes_that_do_not_grow_are_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch, (Moved(7, 0) for _ in range(100)))
    with pytest.raises(StartError, match="prefill-0 and decode-0 do not exchange KV caches: decode-0 answered, but"):
        pair.connect(pair.prefill, pair.decode)
    assert len(pair.ranks) == 2 * pulse.ATTEMPTS


def test_a_read_that_fails_is_told_from_one_that_never_was(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch, (Moved(7, number) for number in range(100)))
    with pytest.raises(StartError, match="a read failed; decode-0's log says why"):
        pair.connect(pair.prefill, pair.decode)


def test_a_prefill_that_still_holds_the_prompt_was_read_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch, (Moved(number, 0) for number in range(100)))
    monkeypatch.setattr(pulse, "look", lambda *_: Pulse(True, Load(kv_usage=0.1)))
    pair.connect(pair.prefill, pair.decode)
    with pytest.raises(StartError, match="prefill-0 still holds the prompt, so nobody has read it"):
        connect(pair.dispatcher, pair.prefill, pair.decode, GROUPED_QUERY, prefill_is_idle=True)
