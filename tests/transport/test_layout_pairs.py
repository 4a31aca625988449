"""Every pair of layouts up to TP 4 x PP 4, byte-checked through the planner with a plain memory copy."""

from __future__ import annotations

import ctypes
import itertools
from functools import cache

import numpy as np
import pytest

from kvferry.geometry import EngineLayout, Span, check, descriptors, plan

from .caches import LAYERS, Model, Side, WorkerCache, make_engine, make_pair, truth

MODELS = (
    Model("grouped-query", "attention", heads=8, cell_bytes=16, opaque=True),
    Model("few-heads", "attention", heads=2, cell_bytes=16, order="NHD"),
    Model("latent", "latent", heads=1, cell_bytes=36),
    Model("grouped-query-plain", "attention", heads=8, cell_bytes=16),
    Model("six-heads", "attention", heads=6, cell_bytes=16, order="NHD"),
)
LAYOUTS = tuple(itertools.product(range(1, 5), range(1, 5)))


@cache
def _producer(side: Side) -> tuple[EngineLayout, list[WorkerCache]]:
    caches = [WorkerCache(side, index) for index in range(side.workers)]
    return make_engine(side, [worker.published() for worker in caches]), caches


def _label(layout: tuple[int, int]) -> str:
    return "tp{}pp{}".format(*layout)


def _copy(producer: EngineLayout, reader: WorkerCache, remote_blocks: list[int], tokens: Span) -> None:
    """What NIXL does, done by the processor."""
    for pieces in plan(producer, reader.published()).reads.values():
        for part in descriptors(pieces, [remote_blocks], [reader.side.blocks], tokens).values():
            for local, remote, size in zip(part.local.tolist(), part.remote.tolist(), part.sizes.tolist(), strict=True):
                ctypes.memmove(local, remote, size)


@pytest.mark.parametrize("consumer", LAYOUTS, ids=_label)
@pytest.mark.parametrize("producer", LAYOUTS, ids=_label)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_consumer_byte_is_right(model: Model, producer: tuple[int, int], consumer: tuple[int, int]) -> None:
    """Each worker of the consumer holds the request's bytes where they belong, and nothing else has changed."""
    producer_side, consumer_side = make_pair(model, producer, consumer)
    engine, _ = _producer(producer_side)
    readers = [WorkerCache(consumer_side, index) for index in range(consumer_side.workers)]
    assert check(engine, make_engine(consumer_side, [reader.published() for reader in readers])) == []
    for reader in readers:
        assert reader.difference(), "the cache is right before anything was moved, so the test would prove nothing"
        _copy(engine, reader, producer_side.blocks, Span(0, producer_side.tokens))
    assert not [reader.difference() for reader in readers if reader.difference()]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_producers_are_only_read(model: Model) -> None:
    """The producer's memory is afterwards what it was."""
    producer_side, consumer_side = make_pair(model, (2, 2), (3, 1))
    engine, caches = _producer(producer_side)
    _copy(engine, WorkerCache(consumer_side, 0), producer_side.blocks, Span(0, producer_side.tokens))
    assert not [worker.difference() for worker in caches if worker.difference()]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_function_tells_all_cells_apart(model: Model) -> None:
    """No two cells hold the same bytes, so that none can be taken for another."""
    cells = truth(model, 80).reshape(-1, model.cell_bytes)
    assert len(np.unique(cells, axis=0)) == len(cells) == LAYERS * model.heads * 80
