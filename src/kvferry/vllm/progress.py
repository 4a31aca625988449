"""How far prefills are that can be read while they go on: what was scheduled counts once its step has been executed.

With host staging all are followed that can be read at all, since workers have to be told what each step writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from kvferry.geometry import Span
from kvferry.vllm.metadata import Written

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class News:
    """What ``Grants.progress`` is told."""

    request: str
    life: int
    blocks: list[list[int]]
    ready: int


@dataclass(slots=True)
class _Prefill:
    """A request that is followed.

    Attributes:
        blocks: by KV cache group; empty while it has none.
        life: how often it lost them.
        scheduled: tokens from the first on that are computed in them, steps under way included.
    """

    request: Request
    blocks: list[list[int]] = field(default_factory=list)
    life: int = 0
    scheduled: int = 0

    def take(self, blocks: Iterable[Iterable[int]]) -> None:
        new = [list(group) for group in blocks]
        self.blocks = [old + more for old, more in zip(self.blocks, new, strict=True)] if self.blocks else new

    def lose(self) -> None:
        if self.blocks:
            self.blocks, self.life, self.scheduled = [], self.life + 1, 0

    def news(self, ready: int) -> News:
        return News(self.request.request_id, self.life, self.blocks, ready)


class Progress:
    """Of one engine core, told from the scheduler's steps. Costs nothing while nothing is followed.

    Attributes:
        written: by the last step.
    """

    def __init__(self) -> None:
        self.written: list[Written] = []
        self._prefills: dict[str, _Prefill] = {}
        self._steps: dict[int, list[News]] = {}
        self._step = 0

    def follow(self, request: Request) -> None:
        self._prefills[request.request_id] = _Prefill(request)

    def forget(self, request_id: str) -> int:
        """How many of its tokens, from the first on, were scheduled while it was followed."""
        prefill = self._prefills.pop(request_id, None)
        return prefill.scheduled if prefill else 0

    def scheduled(self, output: SchedulerOutput) -> tuple[int | None, list[News]]:
        """Look at a step before it is executed.

        A preempted request's blocks may be written by others from this step on, so that is news at once; and so is
        where a request lies that has just begun.

        Returns:
            Its number, None if it computes nothing that is followed; and what is news already.
        """
        self.written = []
        if not self._prefills:
            return None, []
        at_once = [prefill.news(0) for prefill in self._prefills.values() if self._lost(prefill)]
        will_be = []
        for prefill, computed, begun in self._followed(output):
            end = computed + output.num_scheduled_tokens[prefill.request.request_id]
            prefill.scheduled = end
            will_be.append(prefill.news(end))
            # A cached prefix may have been computed for a request that nobody could read.
            tokens = Span(0 if begun else computed, min(end, prefill.request.num_prompt_tokens))
            if tokens:
                self.written.append(Written(prefill.blocks, tokens))
            if begun:
                at_once.append(prefill.news(0))
        if not will_be:
            return None, at_once
        self._step += 1
        self._steps[self._step] = will_be
        return self._step, at_once

    def executed(self, step: int) -> list[News]:
        """What has become true with a step."""
        return self._steps.pop(step, [])

    @staticmethod
    def _lost(prefill: _Prefill) -> bool:
        if prefill.request.status is not RequestStatus.PREEMPTED or not prefill.blocks:
            return False
        prefill.lose()
        return True

    def _followed(self, output: SchedulerOutput) -> Iterator[tuple[_Prefill, int, bool]]:
        """Followed prefills in a step: with how many tokens computed before it, and whether it is their first."""
        for new in output.scheduled_new_reqs:
            prefill = self._prefills.get(new.req_id)
            if prefill is not None:
                prefill.lose()
                prefill.take(new.block_ids)
                yield prefill, new.num_computed_tokens, True
        cached = output.scheduled_cached_reqs
        for request_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            prefill = self._prefills.get(request_id)
            if prefill is None:
                continue
            again = request_id in cached.resumed_req_ids
            if again:
                prefill.lose()
            if blocks is not None:
                prefill.take(blocks)
            yield prefill, computed, again
