"""The arithmetic of a report."""

import msgspec
import pytest

from kvferry.bench.transfer.pair import Sample
from kvferry.bench.transfer.question import Pair, Question
from kvferry.bench.transfer.report import Spread, report
from kvferry.cluster.blueprint import CacheShape

SAMPLE = Sample(
    pair="tp1 -> tp1",
    equal=True,
    tokens=64,
    bytes=2_000_000_000,
    descriptors=10,
    readers=1,
    producers=1,
    seconds=2.0,
    ceiling_s=1.0,
    ranges_s=1.8,
    copy_s=0.5,
    post_s=0.1,
    gap_s=0.01,
    quiet_gap_s=0.002,
    readers_cpu_s=0.5,
    producers_cpu_s=0.1,
    ceiling_cpu_s=0.4,
    ranges_cpu_s=0.45,
    contact_s=0.03,
    contact_bytes=1000.0,
)


def _rows(*samples):
    question = Question(CacheShape("attention", 4, 4, 64, "bfloat16"), (Pair.parse("tp=1:tp=1"),), (64,))
    return report(question, samples).rows


def _with(**change):
    return msgspec.structs.replace(SAMPLE, **change)


def test_rates_are_bytes_over_seconds():
    (row,) = _rows(SAMPLE)
    assert (row.rate.median, row.ceiling.median, row.copy.median) == (1.0, 2.0, 4.0)
    assert row.ratio.median == 0.5
    assert row.cpu_ratio.median == pytest.approx(0.8)
    assert (row.ranges_ratio.median, row.ranges_cpu_ratio.median) == pytest.approx((0.9, 0.9))


def test_a_ratio_is_of_the_ceiling_beside_it():
    """Not of the median ceiling: a slow moment slows both."""
    slow = _with(seconds=20.0, ceiling_s=10.0)
    (row,) = _rows(SAMPLE, slow, SAMPLE)
    assert row.ratio == Spread(0.5, 0.5, 0.5)
    assert row.rate == Spread(1.0, 0.1, 1.0)


def test_medians_have_the_least_and_the_greatest_beside_them():
    (row,) = _rows(*(_with(gap_s=value) for value in (0.5, 0.1, 0.2, 0.4, 0.3)))
    assert row.gap_s == Spread(0.3, 0.1, 0.5)
    assert row.samples == 5


def test_pairs_and_sizes_stay_apart_and_in_order():
    other = _with(pair="tp4 -> pp4", equal=False)
    rows = _rows(SAMPLE, other, _with(tokens=128), SAMPLE, other)
    assert [(row.pair, row.tokens, row.samples) for row in rows] == [
        ("tp1 -> tp1", 64, 2),
        ("tp4 -> pp4", 64, 2),
        ("tp1 -> tp1", 128, 1),
    ]


def test_spread_of_an_even_number_is_between_the_middle_two():
    assert Spread.of([4.0, 1.0, 2.0, 3.0]) == Spread(2.5, 1.0, 4.0)
