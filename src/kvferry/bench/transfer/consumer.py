"""Run as a process: one worker of a consumer, with the reader that an engine's worker has."""

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import msgspec
import numpy as np
import psutil

from kvferry.bench.transfer.cache import Cache
from kvferry.bench.transfer.remote import Role, run
from kvferry.errors import TransferError
from kvferry.geometry import Descriptors, EngineLayout, Span, descriptors, memory_regions, plan
from kvferry.protocol.identity import draw
from kvferry.protocol.loads import Order
from kvferry.sidechannel.client import Client
from kvferry.transport.nixl import Agent
from kvferry.transport.reader import Outcome, Reader

LOAD_S = 60.0
TICK_S = 0.001
PLACE = ("DRAM", 0, "DRAM", 0)

Place: TypeAlias = tuple[str, int, str, int]
"""Kind and device of the memory here, and of that read."""


class Took(msgspec.Struct, frozen=True):
    """When something began and ended, in seconds of the machine's monotonic clock, and its processor time here."""

    began: float
    ended: float
    cpu_s: float


class Loaded(msgspec.Struct, frozen=True):
    """One order on one worker.

    Attributes:
        took: from the order to the producer's word that the blocks were held.
        post_s: spent preparing and posting the reads.
        gap_s: longest time between two ticks of a millisecond of the process's main thread meanwhile.
        rss_bytes: by how much the process has grown.
    """

    took: Took
    post_s: float
    gap_s: float
    bytes: int
    descriptors: int
    peers: int
    rss_bytes: int


class Source(msgspec.Struct, frozen=True):
    """One range of a producer worker's memory."""

    agent: bytes
    address: int
    bytes: int


class Consumer(Role):
    """``engine`` has this worker only, at addresses that are made up."""

    def __init__(self, engine: EngineLayout) -> None:
        self._cache = Cache(engine.workers[0])
        self._cache.memory[:] = 0
        self._ended: queue.Queue[tuple[float, Outcome]] = queue.Queue()
        self._client = Client("kvferry-acks")
        self._reader = Reader(
            layout=replace(engine, workers=(self._cache.worker,)),
            make_agent=lambda: Agent(f"kvferry-bench-{draw()}"),
            ask=self._client.send,
            on_outcome=lambda outcome: self._ended.put((time.monotonic(), outcome)),
        )
        self._reader.start()
        self._agent: Agent | None = None
        self._known: dict[bytes, str] = {}
        self._copy = np.zeros(0, np.uint8)

    def load(self, order: Order, at: float) -> Loaded:
        """Load what ``order`` says, from the moment ``at``.

        Raises:
            TransferError: it failed, or does not end.
        """
        rss = psutil.Process().memory_info().rss
        began, cpu = _wait_until(at)
        self._reader.submit(order)
        gap = self._longest_gap(LOAD_S)
        took = time.process_time() - cpu
        if self._ended.empty():
            raise TransferError(f"a load has not ended within {LOAD_S:.0f} s")
        ended, outcome = self._ended.get()
        if outcome.failure is not None:
            raise TransferError(f"a load has failed: {outcome.failure}")
        return Loaded(
            Took(began, ended, took),
            outcome.post_seconds,
            gap,
            sum(part.bytes for part in outcome.reads),
            sum(part.descriptors for part in outcome.reads),
            len(outcome.reads),
            psutil.Process().memory_info().rss - rss,
        )

    def quiet_gap(self, seconds: float) -> float:
        """The longest gap of the main thread while nothing is read: what this machine does to it."""
        return self._longest_gap(seconds)

    def wrong_bytes(self, order: Order, whole_blocks: int) -> int:
        """Bytes of the first blocks of ``order`` that are not the producer's."""
        return self._cache.wrong_bytes(order.local_blocks[0][:whole_blocks], order.grant.blocks[0][:whole_blocks])

    def clear(self) -> None:
        """Forget what was loaded."""
        self._cache.memory[:] = 0

    def read_whole(self, sources: list[Source], at: float) -> Took:
        """Read each source in one piece, all at the same time, into this worker's cache.

        Raises:
            TransferError: it failed, or does not end.
        """
        local, posts = int(self._cache.memory.ctypes.data), []
        for source in sources:
            rows = (np.array([value]) for value in (local, source.address, source.bytes))
            posts.append((source.agent, {PLACE: Descriptors(*rows)}))
            local += source.bytes
        return self._read_alone(posts, at)

    def read_ranges(self, producer: EngineLayout, order: Order, at: float) -> Took:
        """Read the ranges that a load of ``order`` reads, with nothing around it.

        Raises:
            TransferError: it failed, or does not end.
        """
        span = Span(order.first_token, order.last_token)
        posts = [
            (producer.workers[index].agent, descriptors(pieces, order.grant.blocks, order.local_blocks, span))
            for index, pieces in plan(producer, self._cache.worker).reads.items()
        ]
        return self._read_alone(posts, at)

    def _read_alone(self, posts: Sequence[tuple[bytes, dict[Place, Descriptors]]], at: float) -> Took:
        """Read from several agents at the same time, by NIXL alone."""
        agent = self._agent_alone()
        for metadata, _ in posts:
            if metadata not in self._known:
                self._known[metadata] = agent.connect(metadata)
        began, cpu = _wait_until(at)
        reads = [agent.read(self._known[metadata], ranges) for metadata, ranges in posts]
        for read in reads:
            if not agent.wait(read, LOAD_S) or read.error:
                raise TransferError(read.error or f"a read has not ended within {LOAD_S:.0f} s")
        return Took(began, time.monotonic(), time.process_time() - cpu)

    def copy(self, size: int, at: float) -> Took:
        """Copy as many bytes of this worker's cache within the process."""
        if len(self._copy) != size:
            self._copy = np.ones(size, np.uint8)
        began, cpu = _wait_until(at)
        np.copyto(self._copy, self._cache.memory[:size])
        return Took(began, time.monotonic(), time.process_time() - cpu)

    def _agent_alone(self) -> Agent:
        """An agent of its own: the reader's never leaves its thread."""
        if self._agent is None:
            self._agent = Agent(f"kvferry-bench-{draw()}")
            self._agent.register(memory_regions(self._cache.worker.shards))
        return self._agent

    def _longest_gap(self, seconds: float) -> float:
        """Tick on the main thread, until a load has ended or for so many seconds."""
        assert threading.current_thread() is threading.main_thread()
        now = time.monotonic()
        until, longest = now + seconds, 0.0
        while self._ended.empty() and now < until:
            time.sleep(TICK_S)
            last, now = now, time.monotonic()
            longest = max(longest, now - last)
        return longest


def _wait_until(at: float) -> tuple[float, float]:
    """Returns the moment, and processor time so far."""
    time.sleep(max(0.0, at - time.monotonic()))
    return time.monotonic(), time.process_time()


if __name__ == "__main__":
    run(Consumer)
