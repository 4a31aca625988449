"""Which of several instances gets a request; functions and small state, without clocks or sockets.

Rendezvous hashing is the consistent hash here: for each key every target has a fixed score, so a target that comes or
goes moves only the keys it wins or wins no longer.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Sequence

from kvferry.gateway.health import Rank
from kvferry.gateway.settings import Policy

BOUND = 1.25
"""How much more than its share a target may carry before an affine request goes on to the next one; the value of the
paper on consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2016)."""


class Balancer:
    """Chooses by one policy. ``choose`` needs at least one candidate."""

    def __init__(self, policy: Policy) -> None:
        self._turn = itertools.count()
        self._policy = policy

    def choose(self, candidates: Sequence[Rank], key: bytes, cost: float) -> Rank:
        """One of ``candidates`` for work of ``cost``, in the unit of their loads, with the affinity ``key``."""
        if self._policy is Policy.AFFINITY:
            return affine(candidates, key, cost)
        # Equal loads take turns too; the first one would get every request of a quiet time.
        turn = next(self._turn) % len(candidates)
        in_turn = (*candidates[turn:], *candidates[:turn])
        return in_turn[0] if self._policy is Policy.ROUND_ROBIN else min(in_turn, key=lambda one: one.load)


def affine(candidates: Sequence[Rank], key: bytes, cost: float) -> Rank:
    """The target that wins ``key`` among those that carry no more than their share; there always is one."""

    def score(one: Rank) -> bytes:
        return hashlib.blake2b(one.name.encode(), key=key, digest_size=8).digest()

    bound = BOUND * (sum(one.load for one in candidates) + cost) / len(candidates)
    return max((one for one in candidates if one.load <= bound), key=score)


class SeenPrompts:
    """How much of a prompt a target has seen before, from the beginning of it; the oldest are forgotten.

    Args:
        size: prompts' blocks remembered, over all targets.
    """

    BLOCK = 512

    def __init__(self, size: int = 1 << 16) -> None:
        self._size = size
        self._seen: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    def fraction(self, target: str, prompt: bytes) -> float:
        blocks = self._blocks(prompt)
        known = list(itertools.takewhile(lambda block: (target, block) in self._seen, blocks))
        return len(known) / max(1, len(blocks))

    def add(self, target: str, prompt: bytes) -> None:
        for block in self._blocks(prompt):
            self._seen[target, block] = None
            self._seen.move_to_end((target, block))
        while len(self._seen) > self._size:
            self._seen.popitem(last=False)

    def _blocks(self, prompt: bytes) -> list[bytes]:
        """A hash for each whole block of the prompt, over all of it up to there."""
        state, found = hashlib.blake2b(digest_size=12), []
        for start in range(0, len(prompt) - self.BLOCK + 1, self.BLOCK):
            state.update(prompt[start : start + self.BLOCK])
            found.append(state.digest())
        return found
