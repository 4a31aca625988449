"""What a load costs the transfer thread before the first byte moves, against what it might grow with.

The reader is the real one, and so are handshake, check, plan and descriptors; only NIXL takes what it is given and says
that it is done.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec

from kvferry.bench.transfer.core import LEASE_S
from kvferry.bench.transfer.question import Pair
from kvferry.cluster.blueprint import Blocks, CacheShape, blueprint
from kvferry.geometry import Descriptors, EngineLayout
from kvferry.protocol.identity import draw
from kvferry.protocol.loads import Order
from kvferry.protocol.messages import Ack, Granted, Held, Hello, Request, Welcome
from kvferry.transport.nixl import Agent, Read
from kvferry.transport.reader import Outcome, Reader

REPEATS = 20
BLOCKS_MOVED = (64, 128, 256, 512, 1024, 2048, 4096)
CACHE_BLOCKS = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20)
PEERS = (1, 4, 16, 64, 256)
USUAL_BLOCKS, USUAL_CACHE, USUAL_PEERS = 512, 1 << 14, 4
PAIR = Pair.parse("tp=2,pp=2:tp=4")


class Point(msgspec.Struct, frozen=True):
    """The cost of a load where one thing is varied.

    Attributes:
        axis: what is varied: blocks moved, blocks in each cache, or producers known.
        post_s: median seconds that preparing and posting takes on one worker.
        contact_s: seconds of the first contact with the producer, without network and NIXL.
    """

    axis: str
    value: int
    descriptors: int
    post_s: float
    contact_s: float


def points(shape: CacheShape, block_tokens: int) -> Iterator[Point]:
    """Every point as soon as it is there."""
    for moved in BLOCKS_MOVED:
        yield _point("blocks moved", moved, shape, block_tokens, moved=moved)
    for count in CACHE_BLOCKS:
        yield _point("blocks in the cache", count, shape, block_tokens, count=count)
    for peers in PEERS:
        yield _point("known producers", peers, shape, block_tokens, peers=peers)


POINTS = len(BLOCKS_MOVED) + len(CACHE_BLOCKS) + len(PEERS)


class _Nixl:
    """Takes everything, and has always read it."""

    def register(self, regions: Any) -> None: ...

    def metadata(self) -> bytes:
        return b""

    def connect(self, metadata: bytes) -> str:
        return metadata.decode()

    def disconnect(self, agent: str) -> None: ...

    def read(self, agent: str, ranges: dict[tuple[str, int, str, int], Descriptors]) -> Read:
        count = sum(map(len, ranges.values()))
        return Read(agent, [], None, sum(part.bytes for part in ranges.values()), count)

    def touch(self, agent: str, *_: Any) -> Read:
        return Read(agent)

    def poll(self, _: Read) -> bool:
        return True


class _Producers:
    """Answers for producers that are only described."""

    def __init__(self, described: EngineLayout) -> None:
        self._described = described

    def ask(self, _address: Any, request: Request, _timeout: float, on_reply: Any) -> None:
        if isinstance(request, Hello):
            on_reply(Welcome(replace(self._described, incarnation=request.incarnation)))
        elif isinstance(request, Ack):
            on_reply(Held())


def _point(
    axis: str,
    value: int,
    shape: CacheShape,
    block_tokens: int,
    moved: int = USUAL_BLOCKS,
    count: int = USUAL_CACHE,
    peers: int = USUAL_PEERS,
) -> Point:
    blocks = Blocks(block_tokens, count)
    producer, consumer = blueprint(shape, PAIR.producer, blocks), blueprint(shape, PAIR.consumer, blocks)
    outcomes: list[Outcome] = []
    reader = Reader(
        layout=replace(consumer, workers=consumer.workers[:1]),
        make_agent=lambda: cast(Agent, _Nixl()),
        ask=_Producers(producer).ask,
        on_outcome=outcomes.append,
    )
    reader.open()
    # No two neighbours, so that there are as many ranges as there can be.
    ids = list(range(1, 2 * moved, 2)) if 2 * moved <= count else list(range(1, moved + 1))
    incarnations = [draw() for _ in range(peers)]
    contact_s = statistics.median(_load(reader, outcomes, one, ids, block_tokens)[0] for one in incarnations)
    loads = [_load(reader, outcomes, incarnations[index % peers], ids, block_tokens)[1] for index in range(REPEATS)]
    descriptors = sum(part.descriptors for part in outcomes[-1].reads)
    return Point(axis, value, descriptors, statistics.median(loads), contact_s)


def _load(
    reader: Reader, outcomes: list[Outcome], incarnation: str, ids: Sequence[int], block_tokens: int
) -> tuple[float, float]:
    """Seconds in all, and for preparing and posting."""
    before = len(outcomes)
    began = time.perf_counter()
    tokens = len(ids) * block_tokens
    granted = Granted([[*ids]], tokens, LEASE_S, ready=tokens)
    reader.submit(Order("r", "r", (incarnation, 1), incarnation, draw(), granted, [[*ids]], 0, tokens))
    while len(outcomes) == before:
        reader.turn(0.0)
    outcome = outcomes[-1]
    assert outcome.failure is None, outcome.failure
    return time.perf_counter() - began, outcome.post_seconds
