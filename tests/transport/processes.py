"""Processes that hold the agents of workers, driven over pipes.

An agent is connected and its memory registered once; each pair of layouts is laid out anew inside that memory.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec
import numpy as np

from kvferry.geometry import EngineLayout, Span, WorkerShards, check, descriptors, plan
from kvferry.transport.nixl import Agent, Read

from .caches import Bytes, Side, WorkerCache, make_engine

START_DEADLINE_S = 60.0
REPLY_DEADLINE_S = 30.0
READ_DEADLINE_S = 20.0


@dataclass
class Worker:
    """One worker: an agent, its registered memory and the cache that is laid out in it now."""

    name: str
    memory: Bytes
    agent: Agent = field(init=False)
    cache: WorkerCache | None = None
    known: dict[bytes, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.agent = Agent(self.name)
        address = int(self.memory.ctypes.data)
        self.agent.register([("DRAM", 0, Span(address, address + len(self.memory)))])

    def lay_out(self, side: Side, index: int) -> WorkerShards:
        self.cache = WorkerCache(side, index, self.memory)
        return self.cache.published(self.agent.metadata())

    def post(self, producer: EngineLayout, remote_blocks: list[int], tokens: Span) -> list[Read]:
        assert self.cache
        reads = []
        for index, pieces in plan(producer, self.cache.published()).reads.items():
            metadata = producer.workers[index].agent
            if metadata not in self.known:
                self.known[metadata] = self.agent.connect(metadata)
            ranges = descriptors(pieces, [remote_blocks], [self.cache.side.blocks], tokens)
            reads.append(self.agent.read(self.known[metadata], ranges))
        return reads


class Workers:
    """Some of one engine's workers; runs inside a process of its own. Methods are called over the pipe."""

    def __init__(self, name: str, indices: Sequence[int], size: int) -> None:
        self._workers = {index: Worker(f"{name}-{index}", _anonymous_memory(size)) for index in indices}

    def lay_out(self, side: Side) -> dict[int, bytes]:
        """Fill the caches of the workers that ``side`` has; what each of them publishes, encoded as for a peer."""
        encode = msgspec.msgpack.encode
        return {
            index: encode(worker.lay_out(side, index))
            for index, worker in self._workers.items()
            if index < side.workers
        }

    def load(self, producer: bytes, remote_blocks: list[int], tokens: Span) -> tuple[list[str], int]:
        """Read what the laid out caches need from ``producer``, all at once: what went wrong, and bytes moved."""
        engine = msgspec.msgpack.decode(producer, type=EngineLayout)
        loading = [(worker, worker.post(engine, remote_blocks, tokens)) for worker in self._laid_out()]
        problems = []
        for worker, reads in loading:
            for read in reads:
                if not worker.agent.wait(read, READ_DEADLINE_S):
                    problems.append(f"{worker.name}: a read from {read.agent} has not ended")
                elif read.error:
                    problems.append(f"{worker.name}: {read.error}")
        return problems, sum(read.bytes for _, reads in loading for read in reads)

    def differences(self) -> list[str]:
        """Every laid out cache that is not as it must be after the transfer."""
        found = [worker.cache.difference() for worker in self._laid_out() if worker.cache]
        return [difference for difference in found if difference]

    def forget(self) -> None:
        """No cache is laid out any more; agents and connections stay."""
        for worker in self._workers.values():
            worker.cache = None

    def _laid_out(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.cache]


def _anonymous_memory(size: int) -> Bytes:
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def _serve(make: Callable[..., Any], arguments: tuple[Any, ...], pipe: Connection) -> None:
    try:
        target = make(*arguments)
        pipe.send((None, os.getpid()))
        while True:
            method, values = pipe.recv()
            try:
                pipe.send((None, getattr(target, method)(*values)))
            except Exception:
                pipe.send((traceback.format_exc(), None))
    except EOFError:
        pass
    except Exception:
        pipe.send((traceback.format_exc(), None))


class Remote:
    """An object in a process of its own."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(make, arguments, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def wait_ready(self) -> None:
        self.result(START_DEADLINE_S)

    def call(self, method: str, *values: Any) -> Any:
        self.send(method, *values)
        return self.result()

    def send(self, method: str, *values: Any) -> None:
        self._pipe.send((method, values))

    def result(self, deadline_s: float = REPLY_DEADLINE_S) -> Any:
        if not self._pipe.poll(deadline_s):
            raise TimeoutError(f"process {self.process.pid} has not answered within {deadline_s} s")
        error, value = self._pipe.recv()
        if error:
            raise AssertionError(f"in process {self.process.pid}:\n{error}")
        return value

    def stop(self) -> None:
        self._pipe.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(5)


@contextlib.contextmanager
def running(*remotes: Remote) -> Iterator[None]:
    """Wait until all are ready; stop all in the end, whatever happens."""
    try:
        for remote in remotes:
            remote.wait_ready()
        yield
    finally:
        for remote in remotes:
            remote.stop()


class Engines:
    """Two processes for the workers of each side, workers dealt out in turn."""

    def __init__(self, most_workers: int, size: int) -> None:
        self.sides = {
            side: [Remote(Workers, f"{side}{part}", range(part, most_workers, 2), size) for part in range(2)]
            for side in ("producer", "consumer")
        }

    @property
    def remotes(self) -> list[Remote]:
        return [remote for remotes in self.sides.values() for remote in remotes]

    def transfer(self, producer: Side, consumer: Side) -> int:
        """Move the request of ``producer`` to ``consumer``; bytes moved.

        Raises:
            AssertionError: a read failed, or a byte on either side is not what it must be.
        """
        self._each(self.remotes, "forget")
        engine = self._lay_out("producer", producer)
        assert check(engine, self._lay_out("consumer", consumer)) == []
        request = (msgspec.msgpack.encode(engine), producer.blocks, Span(0, producer.tokens))
        loads = self._each(self.sides["consumer"], "load", *request)
        assert [problem for problems, _ in loads for problem in problems] == []
        assert [text for texts in self._each(self.remotes, "differences") for text in texts] == []
        return sum(moved for _, moved in loads)

    def _lay_out(self, name: str, side: Side) -> EngineLayout:
        published: dict[int, bytes] = {}
        for part in self._each(self.sides[name], "lay_out", side):
            published |= part
        decode = msgspec.msgpack.decode
        return make_engine(side, [decode(published[index], type=WorkerShards) for index in sorted(published)])

    @staticmethod
    def _each(remotes: Sequence[Remote], method: str, *values: Any) -> list[Any]:
        for remote in remotes:
            remote.send(method, *values)
        return [remote.result() for remote in remotes]
