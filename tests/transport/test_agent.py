"""One agent and what becomes of it when peers misbehave: real NIXL, producers in processes of their own.

What NIXL 1.5.1 with UCX does here, found by experiment:

* Over shared memory the reader copies by itself (CMA): a producer that is killed or stopped while it is read from an
  established connection need not even be noticed, the bytes are right.
* The first read from a producer needs its answer. A killed one is noticed by the socket beneath: posting a read raises
  NIXL_ERR_REMOTE_DISCONNECT, as does asking for the state of one posted before. A stopped one is not: the read stays in
  progress until the process dies or goes on.
* Over TCP every read needs the producer, so a killed one ends it with NIXL_ERR_REMOTE_DISCONNECT, some bytes written.
* The reading process survives each of these, the handle can be released, and reads from other agents go on.
* Metadata cut short leaves what was understood of it behind: its agent's name cannot be connected any more, forgetting
  it does not help. Real metadata with bytes changed can end the process (SIGSEGV). So names must be unguessable, and
  metadata must come from an authenticated peer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import psutil
import pytest

from kvferry.errors import TransferError
from kvferry.geometry import Descriptors, Span
from kvferry.transport.nixl import Agent, Read

from .processes import Remote, running

SIZE = 1 << 25
PIECE = 1 << 16
PLACE = ("DRAM", 0, "DRAM", 0)
DEADLINE_S = 20.0
IDLE_SHARE = 0.05
OTHERS_SHARE = 0.1
PRODUCER_BYTE = 7


class Producer:
    """One worker whose memory holds the same number everywhere."""

    def __init__(self, name: str) -> None:
        self._memory = np.full(SIZE, PRODUCER_BYTE, np.uint8)
        self._agent = Agent(name)
        self._agent.register([("DRAM", 0, _extent(self._memory))])

    def published(self) -> tuple[bytes, int]:
        """Metadata of the agent and address of the memory."""
        return self._agent.metadata(), self._memory.ctypes.data


class Consumer:
    """One worker that reads from producers."""

    def __init__(self, name: str, transports: str | None = None) -> None:
        if transports:
            os.environ["UCX_TLS"] = transports
        self.memory = np.zeros(SIZE, np.uint8)
        self._agent = Agent(name)
        self._agent.register([("DRAM", 0, _extent(self.memory))])
        self._read: Read | None = None

    def connect(self, metadata: bytes) -> str:
        return self._agent.connect(metadata)

    def refuses(self, metadata: bytes) -> bool:
        return _refuses(self._agent, metadata)

    def accepted_beginnings(self, metadata: bytes) -> list[int]:
        """Lengths of which an agent of its own took the beginning of ``metadata`` for the whole."""
        agent = Agent("cut-short")
        return [length for length in range(len(metadata)) if not _refuses(agent, metadata[:length])]

    def post(self, agent: str, address: int, size: int = SIZE) -> None:
        self.memory[:] = 0
        starts = np.arange(0, size, PIECE, dtype=np.int64)
        # One byte less than a piece, so that nothing can be joined to one large copy.
        sizes = np.minimum(PIECE - 1, size - starts)
        local = int(self.memory.ctypes.data) + starts
        self._read = self._agent.read(agent, {PLACE: Descriptors(local, address + starts, sizes)})

    def others_share(self, agent: str, address: int) -> float:
        """Processor time that other threads take while a read is posted, as a share of what this one takes."""
        process, thread = time.process_time(), time.thread_time()
        self.post(agent, address)
        mine = time.thread_time() - thread
        return (time.process_time() - process - mine) / mine

    def ended(self, deadline_s: float) -> bool:
        assert self._read
        return self._agent.wait(self._read, deadline_s)

    def error(self) -> str | None:
        assert self._read
        return self._read.error

    def has_everything(self, size: int = SIZE) -> bool:
        part = self.memory[:size].reshape(-1, min(size, PIECE))
        return bool((part[:, : PIECE - 1] == PRODUCER_BYTE).all())

    def disconnect(self, agent: str) -> None:
        self._agent.disconnect(agent)


def _refuses(agent: Agent, metadata: bytes) -> bool:
    try:
        agent.connect(metadata)
    except TransferError:
        return True
    return False


def _extent(memory: np.ndarray) -> Span:
    address = int(memory.ctypes.data)
    return Span(address, address + len(memory))


@dataclass(frozen=True)
class Peers:
    """Two consumers and a producer that live through all tests: a failure of one test must not spoil the next."""

    shared_memory: Remote
    tcp: Remote
    producer: Remote

    def consumer(self, transport: str) -> Remote:
        return self.tcp if transport == "tcp" else self.shared_memory


@pytest.fixture(scope="module")
def peers() -> Iterator[Peers]:
    peers = Peers(Remote(Consumer, "consumer"), Remote(Consumer, "tcp-consumer", "tcp"), Remote(Producer, "producer"))
    with running(peers.shared_memory, peers.tcp, peers.producer):
        yield peers


@pytest.fixture
def doomed(request: pytest.FixtureRequest) -> Iterator[Remote]:
    """A producer that a test may kill."""
    remote = Remote(Producer, f"doomed-{request.node.name}")
    with running(remote):
        yield remote


def _connect(consumer: Remote, producer: Remote, *, used: bool) -> tuple[str, int]:
    """Name and address of the producer; with ``used``, something was read from it before."""
    metadata, address = producer.call("published")
    agent = consumer.call("connect", metadata)
    if used:
        _assert_reads_well(consumer, agent, address, size=64)
    return agent, address


def _kill(producer: Remote) -> None:
    producer.process.kill()
    producer.process.join(10)
    assert not producer.process.is_alive()


def _assert_reads_well(consumer: Remote, agent: str, address: int, size: int = SIZE) -> None:
    consumer.call("post", agent, address, size)
    assert consumer.call("ended", 20.0)
    assert consumer.call("error") is None
    assert consumer.call("has_everything", size)


def _assert_lives_on(peers: Peers, consumer: Remote) -> None:
    """After a failure the consumer's process is there and reads from another producer."""
    agent, address = _connect(consumer, peers.producer, used=False)
    _assert_reads_well(consumer, agent, address)


JUNK = (b"", b"junk", bytes(100), b"\xff" * 64, b"nixlSerDes", bytes(range(256)))


@pytest.mark.parametrize("junk", JUNK, ids=["empty", "text", "zeros", "ones", "tag", "counting"])
def test_junk_is_no_metadata(peers: Peers, junk: bytes) -> None:
    """Bytes that NIXL did not make raise TransferError, and the agent still connects to a real peer."""
    assert peers.shared_memory.call("refuses", junk)
    _assert_lives_on(peers, peers.shared_memory)


def test_metadata_cut_short_is_refused(peers: Peers) -> None:
    """No beginning of real metadata is taken for the whole."""
    metadata, _ = peers.producer.call("published")
    assert peers.shared_memory.call("accepted_beginnings", metadata) == []


def test_connecting_again_works(peers: Peers) -> None:
    """A second connect to a known peer, and one after forgetting it, change nothing."""
    consumer = peers.shared_memory
    agent, address = _connect(consumer, peers.producer, used=True)
    for _ in range(2):
        assert _connect(consumer, peers.producer, used=False) == (agent, address)
        _assert_reads_well(consumer, agent, address)
        consumer.call("disconnect", agent)
    _assert_lives_on(peers, consumer)


def test_nothing_else_works_while_a_read_is_posted(peers: Peers) -> None:
    """Over shared memory posting is copying; a thread of NIXL's would fight for UCX's lock all that time."""
    consumer = peers.shared_memory
    agent, address = _connect(consumer, peers.producer, used=True)
    shares = []
    for _ in range(5):
        shares.append(consumer.call("others_share", agent, address))
        assert consumer.call("ended", DEADLINE_S)
    assert sorted(shares)[2] < OTHERS_SHARE, shares


def test_reading_from_a_stranger_is_an_error(peers: Peers) -> None:
    """An agent that was never connected gives an ended read with an error that names it."""
    peers.shared_memory.call("post", "nobody", 4096, 64)
    assert peers.shared_memory.call("ended", 0.0)
    assert "nobody" in peers.shared_memory.call("error")


@pytest.mark.parametrize("offset", [-4096, SIZE - 32, SIZE])
def test_memory_that_was_not_registered_cannot_be_read(peers: Peers, offset: int) -> None:
    """A range before, across the end of, or behind the registered memory is refused; the next read is fine."""
    agent, address = _connect(peers.shared_memory, peers.producer, used=True)
    peers.shared_memory.call("post", agent, address + offset, 64)
    assert peers.shared_memory.call("ended", 5.0)
    assert agent in peers.shared_memory.call("error")
    _assert_lives_on(peers, peers.shared_memory)


@pytest.mark.parametrize("used", [False, True], ids=["before-first-read", "after-first-read"])
def test_reading_from_a_dead_producer_is_an_error(peers: Peers, doomed: Remote, used: bool) -> None:
    """A read posted after the producer was killed ends with an error that names it."""
    agent, address = _connect(peers.shared_memory, doomed, used=used)
    _kill(doomed)
    peers.shared_memory.call("post", agent, address)
    assert peers.shared_memory.call("ended", DEADLINE_S)
    assert agent in peers.shared_memory.call("error")
    peers.shared_memory.call("disconnect", agent)
    _assert_lives_on(peers, peers.shared_memory)


@pytest.mark.parametrize("transport", ["shared-memory", "tcp"])
def test_a_producer_killed_during_a_read_ends_it(peers: Peers, doomed: Remote, transport: str) -> None:
    """The read ends in time, and without an error only if every byte is there."""
    consumer = peers.consumer(transport)
    agent, address = _connect(consumer, doomed, used=True)
    consumer.send("post", agent, address)
    _kill(doomed)
    consumer.result()
    assert consumer.call("ended", DEADLINE_S)
    error = consumer.call("error")
    assert agent in error if error else consumer.call("has_everything")
    _assert_lives_on(peers, consumer)


@pytest.mark.parametrize("transport", ["shared-memory", "tcp"])
def test_a_read_from_a_stopped_producer_is_open_until_it_goes_on(peers: Peers, transport: str) -> None:
    """While the producer cannot answer, the read is not reported as ended, since bytes may still arrive."""
    consumer = peers.consumer(transport)
    agent, address = _connect(consumer, peers.producer, used=True)
    consumer.call("disconnect", agent)
    _connect(consumer, peers.producer, used=False)
    process = psutil.Process(peers.producer.process.pid)
    process.suspend()
    try:
        consumer.call("post", agent, address)
        assert not consumer.call("ended", 1.0)
        assert consumer.call("error") is None
    finally:
        process.resume()
    assert consumer.call("ended", DEADLINE_S)
    assert consumer.call("error") is None
    assert consumer.call("has_everything")


def test_killing_a_stopped_producer_ends_the_read(peers: Peers, doomed: Remote) -> None:
    """What a stopped producer keeps open ends with an error when it dies."""
    agent, address = _connect(peers.tcp, doomed, used=False)
    psutil.Process(doomed.process.pid).suspend()
    peers.tcp.call("post", agent, address)
    assert not peers.tcp.call("ended", 0.2)
    _kill(doomed)
    assert peers.tcp.call("ended", DEADLINE_S)
    assert agent in peers.tcp.call("error")
    _assert_lives_on(peers, peers.tcp)


def test_an_idle_agent_costs_little(peers: Peers) -> None:
    """Both ends of an established connection use under 5% of a core each while nothing moves.

    CPU time does not count what other processes use, but a busy machine makes each wake-up dearer: one quiet window of
    three is enough. A spinning progress thread uses 100% in each.
    """
    _connect(peers.shared_memory, peers.producer, used=True)
    processes = [psutil.Process(remote.process.pid) for remote in (peers.shared_memory, peers.producer)]
    windows: list[list[float]] = []
    while len(windows) < 3:
        windows.append(_busy_shares(processes, seconds=2.0))
        if max(windows[-1]) < IDLE_SHARE:
            return
    pytest.fail(f"shares of a core used while idle: {windows}")


def _busy_shares(processes: list[psutil.Process], seconds: float) -> list[float]:
    """CPU time per second of each process over a window."""

    def used() -> list[float]:
        return [sum(process.cpu_times()[:2]) for process in processes]

    begin, before = time.monotonic(), used()
    time.sleep(seconds)  # the measurement itself: there is no event to wait for
    elapsed = time.monotonic() - begin
    return [(after - earlier) / elapsed for after, earlier in zip(used(), before, strict=True)]
