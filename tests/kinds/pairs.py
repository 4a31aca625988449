"""One request from one engine to another: real NIXL agents, and the connector's own reader on each consumer worker."""

from __future__ import annotations

import itertools
import queue
from dataclasses import replace

import msgspec
import torch

from kvferry.geometry import EngineLayout, Span, check
from kvferry.geometry import memory_regions as regions_of
from kvferry.protocol.loads import Order
from kvferry.protocol.messages import Granted, Held, Hello, Welcome
from kvferry.transport.nixl import Agent
from kvferry.transport.reader import Outcome, Reader

from .caches import Side, Worker

DEADLINE_S = 30.0
_numbers = itertools.count()


def transfer(producer: Side, consumer: Side) -> list[Outcome]:
    """Load the producer's request into the consumer; the end on each worker.

    Raises:
        AssertionError: a byte on either side is not what it must be afterwards.
    """
    held, readers = producer.workers(), consumer.workers()
    before = [worker.memory.clone() for worker in held]
    agents = [_agent(worker) for worker in held]
    engine = producer.engine(held, [agent.metadata() for agent in agents])
    engine = msgspec.msgpack.decode(msgspec.msgpack.encode(engine), type=EngineLayout)
    mine = consumer.engine(readers, [b""] * len(readers))
    assert check(engine, mine) == []
    outcomes = [_load(worker, replace(mine, workers=(worker.published,)), engine, producer) for worker in readers]
    for worker, outcome in zip(readers, outcomes, strict=True):
        assert outcome.failure is None, outcome.failure
        if consumer.staged:
            assert torch.equal(worker.memory, _fresh(worker)), "what is read lands in the copy"
            worker.staged.to_device(consumer.blocks, Span(consumer.cached, consumer.tokens))
        after = worker.memory.clone()
        expected = _expected(worker)
        assert not torch.equal(expected, _fresh(worker)), "nothing was to be moved, so the test would prove nothing"
        wrong = torch.nonzero(after != expected).flatten()
        assert not len(wrong), f"pp{worker.pp}tp{worker.tp}: {len(wrong)} bytes differ, first at {int(wrong[0])}"
    assert all(torch.equal(worker.memory, was) for worker, was in zip(held, before, strict=True))
    return outcomes


def _fresh(worker: Worker) -> torch.Tensor:
    return Worker(worker.side, worker.pp, worker.tp, worker.pcp).memory


def _expected(worker: Worker) -> torch.Tensor:
    other = Worker(worker.side, worker.pp, worker.tp, worker.pcp)
    other.write()
    return other.memory


def _agent(worker: Worker) -> Agent:
    agent = Agent(f"kind-{next(_numbers)}")
    agent.register(regions_of(worker.published.shards))
    return agent


def _load(worker: Worker, layout: EngineLayout, engine: EngineLayout, producer: Side) -> Outcome:
    ended: queue.Queue[Outcome] = queue.Queue()

    def ask(address, message, timeout, on_reply):
        on_reply(Welcome(engine) if isinstance(message, Hello) else Held())

    side = worker.side
    reader = Reader(layout, lambda: Agent(f"kind-{next(_numbers)}"), ask, ended.put)
    reader.start()
    try:
        grant = Granted(producer.blocks, producer.tokens, 30.0, producer.tokens, 0)
        names = ("d", "p", ("127.0.0.1", 1), engine.incarnation, "0" * 32)
        reader.submit(Order(*names, grant, side.blocks, *Span(side.cached, side.tokens)))
        return ended.get(timeout=DEADLINE_S)
    finally:
        reader.close()
