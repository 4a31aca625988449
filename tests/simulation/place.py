"""Where simulated engines live, and how they are set up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kvferry.geometry import Fingerprint
from kvferry.vllm.settings import Settings

from .invariants import Ledger
from .memory import Fabric
from .network import Network
from .world import World

if TYPE_CHECKING:
    from .engine import Core

FINGERPRINT = Fingerprint("simulated", 1, "0.32")


@dataclass
class Place:
    """What all engines share."""

    world: World
    network: Network
    fabric: Fabric
    ledger: Ledger
    settings: Settings
    cores: list[Core] = field(default_factory=list)

    def clock(self) -> Callable[[], float]:
        """The clock of one more process, which began to count at a moment of its own."""
        offset = float(self.world.random.randint(-(10**6), 10**6))
        return lambda: self.world.now + offset

    def lose(self, claim: str) -> None:
        """A lease ended under whoever made this claim."""
        for core in self.cores:
            for name in [name for name, load in core.loads.items() if core.alive and load.claim == claim]:
                core.cover(name, "lease ended")


@dataclass(frozen=True)
class Shape:
    """How an engine is set up, at every start alike.

    Attributes:
        dcp, interleave: ranks that share out the tokens of a block, and how many each takes at a time.
        block_tokens: as the scheduler counts them.
        depth: steps that may be under way at once, as with pipeline parallelism.
        policy: what becomes of a request whose load failed.
        pause: seconds that a step takes at most.
        chunk: tokens of a request that a step computes at most.
    """

    role: Literal["kv_producer", "kv_consumer", "kv_both"]
    tp: int
    pp: int
    dcp: int
    interleave: int
    blocks: int
    block_tokens: int
    depth: int
    policy: Literal["recompute", "fail"]
    pause: float
    chunk: int
