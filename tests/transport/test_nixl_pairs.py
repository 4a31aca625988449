"""Pairs of layouts through real NIXL agents, one per worker, in separate processes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from .caches import Model, Side, arena_bytes, make_pair
from .processes import Engines, running

MODELS = (
    Model("grouped-query", "attention", heads=8, cell_bytes=256, opaque=True),
    Model("few-heads", "attention", heads=2, cell_bytes=128, order="NHD"),
    Model("latent", "latent", heads=1, cell_bytes=576),
    Model("grouped-query-plain", "attention", heads=8, cell_bytes=128),
)
LARGEST = (4, 4)
LAYOUTS = ((1, 1), (2, 1), (1, 2), (3, 1), (2, 2), (3, 4), LARGEST)
PAIRS = list(itertools.product(LAYOUTS, LAYOUTS))
CASES = [(MODELS[number % len(MODELS)], *pair) for number, pair in enumerate(PAIRS)]
CASES += [(model, LARGEST, LARGEST) for model in MODELS if (model, LARGEST, LARGEST) not in CASES]


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    engines = Engines(LARGEST[0] * LARGEST[1], arena_bytes(MODELS))
    with running(*engines.remotes):
        yield engines


def _label(value: Model | tuple[int, int]) -> str:
    return value.name if isinstance(value, Model) else "tp{}pp{}".format(*value)


def _bytes_needed(consumer: Side) -> int:
    """What the consumer's workers lack: every head of every layer once per replica, every token once."""
    heads_of_all_ranks = max(consumer.model.heads, consumer.tp)
    return sum(consumer.stages) * heads_of_all_ranks * consumer.valid_tokens * consumer.model.cell_bytes


@pytest.mark.parametrize(("model", "producer", "consumer"), CASES, ids=_label)
def test_every_byte_is_right_after_a_read_through_nixl(
    engines: Engines, model: Model, producer: tuple[int, int], consumer: tuple[int, int]
) -> None:
    """Consumers hold the request's bytes where they belong and nothing else has changed, on either side."""
    producer_side, consumer_side = make_pair(model, producer, consumer)
    assert engines.transfer(producer_side, consumer_side) == _bytes_needed(consumer_side)


def test_enough_pairs_go_through_nixl() -> None:
    """The issue asks for 40, the largest included."""
    assert len(set(PAIRS)) >= 40
    assert (LARGEST, LARGEST) in PAIRS
