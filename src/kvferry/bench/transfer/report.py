"""From samples to figures: medians with the least and the greatest."""

from collections.abc import Callable, Sequence
from operator import attrgetter

import msgspec

from kvferry.bench.spread import Spread
from kvferry.bench.transfer.acks import Acks
from kvferry.bench.transfer.contact import FirstContact
from kvferry.bench.transfer.growth import Point
from kvferry.bench.transfer.pair import Sample
from kvferry.bench.transfer.question import Question


class Row(msgspec.Struct, frozen=True):
    """One pair and size; see ``Sample`` for what each figure is. Rates are in 1e9 bytes per second.

    Attributes:
        ratio: of rate to ceiling, of each sample with the ceiling that was measured beside it.
        cpu_ratio: of processor time that the readers take for the ceiling to what they take for the load.
        ranges_ratio, ranges_cpu_ratio: the same, of the load's own ranges read by NIXL alone.
    """

    pair: str
    equal: bool
    tokens: int
    samples: int
    bytes: int
    descriptors: int
    readers: int
    producers: int
    rate: Spread
    ceiling: Spread
    copy: Spread
    ratio: Spread
    cpu_ratio: Spread
    ranges_ratio: Spread
    ranges_cpu_ratio: Spread
    post_s: Spread
    gap_s: Spread
    quiet_gap_s: Spread
    readers_cpu_s: Spread
    producers_cpu_s: Spread
    ceiling_cpu_s: Spread
    contact_s: Spread
    contact_bytes: Spread


class Report(msgspec.Struct, frozen=True):
    """Pairs of layouts; ``samples`` are what ``rows`` were made of."""

    transport: str
    blocks: str
    block_tokens: int
    bytes_per_token: int
    rows: tuple[Row, ...]
    samples: tuple[Sample, ...]


class Machine(msgspec.Struct, frozen=True):
    """What absolute figures depend on, and ratios of one run do not; the load is ``bench.machine.load``'s."""

    cores: int
    load_before: float
    load_after: float


class Measured(msgspec.Struct, frozen=True):
    """A whole run; what was not asked for is None.

    Attributes:
        complete: nobody interrupted it.
    """

    complete: bool
    machine: Machine
    pairs: Report | None = None
    contact: list[FirstContact] | None = None
    acks: list[Acks] | None = None
    growth: list[Point] | None = None


def report(question: Question, samples: Sequence[Sample]) -> Report:
    """What ``samples`` say about what was asked."""
    return Report(
        transport=question.transport,
        blocks=question.order,
        block_tokens=question.block_tokens,
        bytes_per_token=question.shape.bytes_per_token,
        rows=rows(samples),
        samples=tuple(samples),
    )


def rows(samples: Sequence[Sample]) -> tuple[Row, ...]:
    """One for each pair and size, in the order they were first measured."""
    kinds = dict.fromkeys((sample.pair, sample.tokens) for sample in samples)
    return tuple(_row([sample for sample in samples if (sample.pair, sample.tokens) == kind]) for kind in kinds)


def _row(samples: Sequence[Sample]) -> Row:
    first = samples[0]

    def spread(value: Callable[[Sample], float]) -> Spread:
        return Spread.of(map(value, samples))

    return Row(
        pair=first.pair,
        equal=first.equal,
        tokens=first.tokens,
        samples=len(samples),
        bytes=first.bytes,
        descriptors=first.descriptors,
        readers=first.readers,
        producers=first.producers,
        rate=spread(lambda one: one.bytes / one.seconds / 1e9),
        ceiling=spread(lambda one: one.bytes / one.ceiling_s / 1e9),
        copy=spread(lambda one: one.bytes / one.copy_s / 1e9),
        ratio=spread(lambda one: one.ceiling_s / one.seconds),
        cpu_ratio=spread(lambda one: one.ceiling_cpu_s / one.readers_cpu_s),
        ranges_ratio=spread(lambda one: one.ranges_s / one.seconds),
        ranges_cpu_ratio=spread(lambda one: one.ranges_cpu_s / one.readers_cpu_s),
        **{name: spread(attrgetter(name)) for name in TAKEN_AS_IS},
    )


TAKEN_AS_IS = (
    *("post_s", "gap_s", "quiet_gap_s", "readers_cpu_s", "producers_cpu_s", "ceiling_cpu_s"),
    *("contact_s", "contact_bytes"),
)
