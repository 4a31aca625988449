"""A median, and how far around it the measurements lie."""

import statistics
from collections.abc import Iterable

import msgspec


class Spread(msgspec.Struct, frozen=True):
    """The median of some measurements, and how far they reach."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """Raises ``ValueError`` where there is none."""
        there = sorted(values)
        if not there:
            raise ValueError("nothing was measured")
        return cls(statistics.median(there), there[0], there[-1])
