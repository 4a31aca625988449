"""Simulated time: a queue of events, one source of chance, and a trace of what happened."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol

import msgspec

TICKS_PER_S = 1024
"""Times are multiples of a power of two, so that sums and differences of them are exact on every clock."""


class ViolationError(AssertionError):
    """What must never happen did; the text says which rule was broken and by whom."""


class Party(Protocol):
    """What an event belongs to: it does not happen once its party is dead."""

    alive: bool


@dataclass(slots=True)
class Event:
    """Something that will happen.

    Attributes:
        party: whose event it is; None for the world's own.
        arrives: host at which a message arrives; it might as well arrive sooner.
    """

    action: Callable[[], None]
    party: Party | None
    arrives: str | None
    done: bool = False

    def happen(self) -> None:
        if not self.done and (self.party is None or self.party.alive):
            self.done = True
            self.action()


class World:
    """The clock and the events of one seed.

    Attributes:
        now: seconds since the start.
        coverage: how often which event met a party in which state.
        trace: a line for everything worth telling; None to tell nothing.
    """

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.coverage: Counter[tuple[str, str]] = Counter()
        self.watch: Callable[[Party | None], None] = lambda party: None
        self._trace = trace
        self._events: list[tuple[float, int, Event]] = []
        self._numbers = itertools.count()

    def at(
        self, delay: float, action: Callable[[], None], party: Party | None = None, arrives: str | None = None
    ) -> None:
        """Let ``action`` happen in ``delay`` seconds, should ``party`` be alive then."""
        time = math.ceil((self.now + delay) * TICKS_PER_S) / TICKS_PER_S
        heapq.heappush(self._events, (time, next(self._numbers), Event(action, party, arrives)))

    def soon(self, longest: float) -> float:
        """Some delay up to ``longest`` seconds."""
        return self.random.random() * longest

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def run(self, until: float) -> None:
        """Let everything happen that is due by then; ``watch`` looks at the event's party after each."""
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            event.happen()
            self.watch(event.party)
        self.now = until

    def interleave(self, host: str) -> None:
        """Another thread of ``host`` gets its turn in the middle of a hook: the next message arrives right now."""
        arrivals = [entry for entry in self._events if entry[2].arrives == host and not entry[2].done]
        if arrivals:
            min(arrivals)[2].happen()

    def cover(self, state: str, event: str) -> None:
        self.coverage[state, event] += 1

    def tell(self, text: str, *values: object) -> None:
        if self._trace is not None:
            self._trace(f"{self.now:9.3f}  {text.format(*map(_brief, values))}")


def _brief(value: object) -> object:
    """Messages without their long names: the first digits tell them apart."""
    if isinstance(value, msgspec.Struct):
        fields = msgspec.structs.asdict(value).items()
        return f"{type(value).__name__}({', '.join(f'{name}={_brief(field)}' for name, field in fields)})"
    text = str(value)
    return text if len(text) < 32 or (" " in text and len(text) < 120) else f"{text[:6]}.."
