"""The processes of one pair of layouts, and what is measured with them."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from kvferry.bench.transfer.consumer import Consumer, Loaded, Source, Took
from kvferry.bench.transfer.core import Core, Held, Identity
from kvferry.bench.transfer.producer import Producer
from kvferry.bench.transfer.question import Pair, Question, Transport
from kvferry.bench.transfer.remote import Remote, Role, Usage, made
from kvferry.errors import TransferError
from kvferry.geometry import EngineLayout, Span, WorkerShards, descriptors, memory_regions, plan
from kvferry.protocol.loads import Order

REPEATS = 4
"""Measurements of each kind in a row, taking turns; the processes are started anew only from round to round."""
SOON_S = 0.03
"""Enough to tell all readers when to begin."""
QUIET_S = 0.3
REMOTE_SEED, LOCAL_SEED = 1, 2

T = TypeVar("T")


class Sample(msgspec.Struct, frozen=True):
    """One load by all workers of a consumer, and what it is compared with, measured right before or after it.

    Attributes:
        pair, equal: the layouts' label, and whether both are the same.
        seconds: from the order to the last worker's word that the blocks were held.
        ceiling_s: the same processes read as many bytes from the same memory, in one piece per producer worker.
        ranges_s: the same processes read the same ranges by NIXL alone: what a load takes without all that is ours.
        copy_s: the same processes copy as many bytes within themselves.
        post_s, gap_s, quiet_gap_s: of the worker where it was longest; see ``Loaded``.
        readers_cpu_s, producers_cpu_s: processor time of all readers, and of all workers that are read and their core.
        ceiling_cpu_s, ranges_cpu_s: of the readers for these.
        contact_s: the first load of all, of one block: hello, plan, connections, read and acknowledgement.
        contact_bytes: by which a reader grew with it, for each producer worker that it met.
    """

    pair: str
    equal: bool
    tokens: int
    bytes: int
    descriptors: int
    readers: int
    producers: int
    seconds: float
    ceiling_s: float
    ranges_s: float
    copy_s: float
    post_s: float
    gap_s: float
    quiet_gap_s: float
    readers_cpu_s: float
    producers_cpu_s: float
    ceiling_cpu_s: float
    ranges_cpu_s: float
    contact_s: float
    contact_bytes: float


class Contact(msgspec.Struct, frozen=True):
    """See ``Sample``."""

    seconds: float
    bytes_per_peer: float
    peers: int


@dataclass(frozen=True)
class Processes:
    """Both engine cores of a pair; ``producer`` is what the readers are told."""

    core: Remote
    identity: Identity
    producers: Sequence[Remote]
    readers: Sequence[Remote]
    producer: EngineLayout
    consumer: EngineLayout

    async def order(self, tokens: int, remote_blocks: list[int], local_blocks: list[int]) -> Order:
        """A request that the producer holds for all readers."""
        names = [worker.name for worker in self.consumer.workers]
        (held,) = await self.core.call("hold", list[Held], blocks=remote_blocks, tokens=tokens, readers=names, count=1)
        return Order(
            request=held.request,
            remote_request=held.request,
            address=self.identity.address,
            incarnation=self.identity.incarnation,
            claim=held.claim,
            grant=held.grant,
            local_blocks=[local_blocks],
            first_token=0,
            last_token=tokens,
        )

    async def first_contact(self) -> Contact:
        """Load one block, which is the first that the readers hear of this producer."""
        block_tokens = self.consumer.workers[0].shards[0].block_tokens
        loads = await self.load(await self.order(block_tokens, [1], [1]))
        grown = max(load.rss_bytes / max(1, load.peers) for load in loads)
        return Contact(elapsed([load.took for load in loads]), grown, max(load.peers for load in loads))

    async def load(self, order: Order) -> list[Loaded]:
        at = time.monotonic() + SOON_S
        return await at_once(*(reader.call("load", Loaded, order=order, at=at) for reader in self.readers))

    async def read_whole(self, sources: Sequence[Sequence[Source]]) -> list[Took]:
        at = time.monotonic() + SOON_S
        both = zip(self.readers, sources, strict=True)
        return await at_once(*(reader.call("read_whole", Took, sources=of, at=at) for reader, of in both))

    async def read_ranges(self, order: Order) -> list[Took]:
        at = time.monotonic() + SOON_S
        calls = (
            reader.call("read_ranges", Took, producer=self.producer, order=order, at=at) for reader in self.readers
        )
        return await at_once(*calls)

    async def copy(self, sizes: Sequence[int]) -> list[Took]:
        at = time.monotonic() + SOON_S
        both = zip(self.readers, sizes, strict=True)
        return await at_once(*(reader.call("copy", Took, size=size, at=at) for reader, size in both))

    async def producers_cpu_s(self) -> float:
        used = await at_once(*(one.call("usage", Usage) for one in (self.core, *self.producers)))
        return sum(one.cpu_s for one in used)

    async def require_right(self, order: Order) -> None:
        """Load into empty memory and look at the bytes.

        Raises:
            TransferError: they are not those of the producer.
        """
        await at_once(*(reader.call("clear", type(None)) for reader in self.readers))
        await self.load(order)
        whole = order.last_token // self.consumer.workers[0].shards[0].block_tokens
        calls = (reader.call("wrong_bytes", int, order=order, whole_blocks=whole) for reader in self.readers)
        wrong = await at_once(*calls)
        if sum(wrong):
            raise TransferError(f"{sum(wrong)} bytes were not those that the producer holds")


async def at_once(*calls: Coroutine[Any, Any, T]) -> list[T]:
    """The results of all. The first error ends the others and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def elapsed(took: Sequence[Took]) -> float:
    """Seconds from the first beginning to the last end."""
    return max(one.ended for one in took) - min(one.began for one in took)


@asynccontextmanager
async def started(
    producer: EngineLayout, consumer: EngineLayout, transport: Transport, processes: int = 0, reserve: bool = False
) -> AsyncIterator[Processes]:
    """The processes of two engine cores that hold what these say.

    Args:
        processes: over how many the producer's workers are dealt out; 0 for one each.
        reserve: the producer's memory is only promised.
    """
    variables, count = transport.variables, processes or len(producer.workers)
    parts = [list(producer.workers[part::count]) for part in range(count)]
    alone = [replace(consumer, workers=(worker,)) for worker in consumer.workers]
    async with AsyncExitStack() as stack:

        def start(role: type[Role], **arguments: Any) -> Coroutine[Any, Any, Remote]:
            return stack.enter_async_context(made(role, variables, **arguments))

        core, *others = await at_once(
            start(Core, secret=""),
            *(start(Producer, workers=part, reserve=reserve) for part in parts),
            *(start(Consumer, engine=engine) for engine in alone),
        )
        producers, readers = others[:count], others[count:]
        identity = await core.call("identity", Identity)
        published = await at_once(*(one.call("workers", list[WorkerShards]) for one in producers))
        workers = tuple(published[index % count][index // count] for index in range(len(producer.workers)))
        described = replace(producer, incarnation=identity.incarnation, workers=workers)
        await core.call("describe", type(None), layout=described)
        yield Processes(core, identity, producers, readers, described, consumer)


async def measure(question: Question, pair: Pair) -> AsyncIterator[Sample]:
    """Start the processes of a pair, and measure all sizes.

    Raises:
        TransferError: something did not work, or bytes were wrong.
    """
    engines = question.engine(pair.producer), question.engine(pair.consumer)
    async with started(*engines, question.transport) as there:
        contact = await there.first_contact()
        for tokens in question.tokens:
            blocks = question.ids(tokens, REMOTE_SEED), question.ids(tokens, LOCAL_SEED)
            await there.require_right(await there.order(tokens, *blocks))
            sources = wholes(there.producer, there.consumer, blocks, tokens)
            await there.read_whole(sources)
            await there.read_ranges(await there.order(tokens, *blocks))
            quiet = await at_once(*(one.call("quiet_gap", float, seconds=QUIET_S) for one in there.readers))
            for index in range(REPEATS):
                measured = await _measure_all(there, tokens, blocks, sources, first=index)
                yield _sample(pair, tokens, there, measured, contact, max(quiet))


@dataclass
class _Measured:
    """What every reader says, of a load and of what it is compared with."""

    loads: list[Loaded] = field(default_factory=list)
    ceiling: list[Took] = field(default_factory=list)
    ranges: list[Took] = field(default_factory=list)
    copies: list[list[Took]] = field(default_factory=list)
    producers_cpu_s: float = 0.0


async def _measure_all(
    there: Processes,
    tokens: int,
    blocks: tuple[list[int], list[int]],
    sources: Sequence[Sequence[Source]],
    first: int,
) -> _Measured:
    """A load, the ceiling and the ranges alone, each after a copy: else what comes later would find its bytes in the
    cache. ``first`` says which of them begins."""
    order = await there.order(tokens, *blocks)
    sizes = [sum(source.bytes for source in of) for of in sources]
    found = _Measured()

    async def load() -> None:
        before = await there.producers_cpu_s()
        found.loads = await there.load(order)
        found.producers_cpu_s = await there.producers_cpu_s() - before

    async def ceiling() -> None:
        found.ceiling = await there.read_whole(sources)

    async def ranges() -> None:
        found.ranges = await there.read_ranges(order)

    measures = load, ceiling, ranges
    for index in range(len(measures)):
        found.copies.append(await there.copy(sizes))
        await measures[(first + index) % len(measures)]()
    return found


def _sample(
    pair: Pair, tokens: int, there: Processes, measured: _Measured, contact: Contact, quiet_gap_s: float
) -> Sample:
    loads = measured.loads
    return Sample(
        pair=pair.label,
        equal=pair.is_equal,
        tokens=tokens,
        bytes=sum(load.bytes for load in loads),
        descriptors=sum(load.descriptors for load in loads),
        readers=len(there.consumer.workers),
        producers=len(there.producer.workers),
        seconds=elapsed([load.took for load in loads]),
        ceiling_s=elapsed(measured.ceiling),
        ranges_s=elapsed(measured.ranges),
        copy_s=sum(map(elapsed, measured.copies)) / len(measured.copies),
        post_s=max(load.post_s for load in loads),
        gap_s=max(load.gap_s for load in loads),
        quiet_gap_s=quiet_gap_s,
        readers_cpu_s=sum(load.took.cpu_s for load in loads),
        producers_cpu_s=measured.producers_cpu_s,
        ceiling_cpu_s=sum(one.cpu_s for one in measured.ceiling),
        ranges_cpu_s=sum(one.cpu_s for one in measured.ranges),
        contact_s=contact.seconds,
        contact_bytes=contact.bytes_per_peer,
    )


def wholes(
    producer: EngineLayout, consumer: EngineLayout, blocks: tuple[list[int], list[int]], tokens: int
) -> list[list[Source]]:
    """For each reader as many bytes from each producer worker as a load moves, in one piece; readers share no bytes
    where there is room."""
    used: dict[int, int] = defaultdict(int)
    found: list[list[Source]] = []
    for reader in consumer.workers:
        found.append([])
        for index, pieces in plan(producer, reader).reads.items():
            parts = descriptors(pieces, [blocks[0]], [blocks[1]], Span(0, tokens)).values()
            size, worker = sum(part.bytes for part in parts), producer.workers[index]
            (_, _, extent) = memory_regions(worker.shards)[0]
            start = used[index] if used[index] + size <= extent.size else 0
            used[index] = start + size
            found[-1].append(Source(worker.agent, extent.start + start, size))
    return found
