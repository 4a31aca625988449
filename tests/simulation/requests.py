"""Requests and the blocks that they hold, as vLLM's scheduler keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.request import RequestStatus

from kvferry.protocol.loads import Order

from .memory import Tokens


@dataclass(eq=False)
class SimulatedRequest:
    """What the connector sees of a vLLM request, and what the model keeps about it.

    Attributes:
        tokens: the prompt and every token the model will generate.
        known: tokens that exist so far.
        on_end: told how it ended, with the parameters for whoever decodes.
        order: its load, once it was given.
        busy: in a step that is under way.
        told: how many of its blocks a step has named; None before its first step, 0 after a preemption.
        transfer: its name in messages, in a transfer that streams.
    """

    request_id: str
    tokens: Tokens
    num_prompt_tokens: int
    kv_transfer_params: dict[str, Any] | None
    arrived: float
    on_end: Callable[[str, dict[str, Any] | None], None]
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    known: int = 0
    blocks: list[int] = field(default_factory=list)
    order: Order | None = None
    ended: str | None = None
    busy: bool = False
    told: int | None = None
    transfer: str | None = None
    lora_request: None = None
    cache_salt: None = None
    mm_features: None = None
    trace_headers: None = None

    def __post_init__(self) -> None:
        self.known = self.num_prompt_tokens
        self.prompt_token_ids = list(self.tokens[: self.num_prompt_tokens])

    @property
    def name(self) -> str:
        return self.transfer or self.request_id

    @property
    def finished(self) -> bool:
        return RequestStatus.is_finished(self.status)


class Pool:
    """Blocks with prefix caching; the block freed last is used next, so that whoever reads too late reads wrong."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.free = list(range(1, blocks))
        self.users: dict[int, int] = dict.fromkeys(self.free, 0)
        self._cached: dict[Tokens, int] = {}
        self._key: dict[int, Tokens] = {}

    def hit(self, request: SimulatedRequest) -> list[int]:
        """Blocks that hold the start of the request's tokens; the last token is always computed."""
        blocks: list[int] = []
        for stop in range(self.block_tokens, request.known, self.block_tokens):
            block = self._cached.get(request.tokens[:stop])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def take(self, request: SimulatedRequest, hit: list[int], tokens: int) -> bool:
        """Give the request ``hit`` and as many new blocks as ``tokens`` tokens need, or nothing."""
        needed = -(-tokens // self.block_tokens) - len(request.blocks) - len(hit)
        if needed > len(self.free) - sum(not self.users[block] for block in hit):
            return False
        for block in hit:
            if not self.users[block]:
                self.free.remove(block)
            self.users[block] += 1
        new = [self._new() for _ in range(max(0, needed))]
        request.blocks += [*hit, *new]
        return True

    def _new(self) -> int:
        block = self.free.pop()
        self.users[block] = 1
        if block in self._key:
            self._cached.pop(self._key.pop(block))
        return block

    def cache(self, request: SimulatedRequest) -> None:
        """What the request has computed or loaded can be found by others."""
        for index in range(request.num_computed_tokens // self.block_tokens):
            key = request.tokens[: (index + 1) * self.block_tokens]
            block = request.blocks[index]
            if key not in self._cached and block not in self._key:
                self._cached[key], self._key[block] = block, key

    def release(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)
