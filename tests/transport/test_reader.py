"""The transfer thread against a real producer: real NIXL, a real listener, real grants."""

import queue
import threading
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from kvferry.geometry import EngineLayout, Fingerprint, LayerShard, Span, WorkerShards, memory_regions
from kvferry.protocol.grants import Grants
from kvferry.protocol.identity import draw
from kvferry.protocol.loads import Order
from kvferry.protocol.messages import Ack, Claim, Follow, Granted, Hello, Transfer, Welcome, encode
from kvferry.sidechannel.client import Client
from kvferry.sidechannel.server import Listener
from kvferry.transport import reader as reader_module
from kvferry.transport.nixl import Agent
from kvferry.transport.reader import Deadlines, Reader

DEADLINE_S = 30.0
BLOCKS, BLOCK_TOKENS, HEADS, CELL = 12, 16, 4, 32
LAYERS = ["model.layers.0.attn", "model.layers.1.attn"]
FINGERPRINT = Fingerprint("model", 1, "0.32")
READER = "pp0tp0"


def _make_shards(memory, layers=LAYERS, dtype="float32"):
    """Shards of ``layers`` over an array of shape (layers, blocks, heads, tokens, bytes)."""
    return tuple(
        LayerShard(
            layer=layer,
            kind="attention",
            heads=Span(0, HEADS),
            total_heads=HEADS,
            block_tokens=BLOCK_TOKENS,
            num_blocks=BLOCKS,
            cell_bytes=CELL,
            dtype=dtype,
            packing="CPU_ATTN/vec",
            opaque=True,
            group=0,
            address=memory[index].ctypes.data,
            block_stride=HEADS * BLOCK_TOKENS * CELL,
            head_stride=BLOCK_TOKENS * CELL,
            token_stride=CELL,
        )
        for index, layer in enumerate(layers)
    )


def _make_memory(fill):
    memory = np.zeros((len(LAYERS), BLOCKS, HEADS, BLOCK_TOKENS, CELL), np.uint8)
    memory[:] = fill(np.arange(memory.size, dtype=np.int64).reshape(memory.shape))
    return memory


def _claim(incarnation, grant, readers=(READER,), **change):
    named = (incarnation, grant.name, grant.nonce, draw(), draw(), list(readers), grant.tokens, grant.token_hash)
    return msgspec.structs.replace(Claim(*named), **change)


class Producer:
    """One engine core with one worker, without vLLM: an agent, grants and a listener."""

    def __init__(self, port=0, lease=30.0, layers=LAYERS, dtype="float32", mute=()):
        self.memory = _make_memory(lambda index: (index * 31 + 7) % 251)
        self.grants = Grants(draw(), lease, time.monotonic)
        self.hellos, self.muted = 0, mute
        self._agent = Agent(f"producer-{draw()}")
        shards = _make_shards(self.memory, layers, dtype)
        self._agent.register(memory_regions(shards))
        worker = WorkerShards(0, 0, shards, self._agent.metadata())
        self._welcome = encode(Welcome(EngineLayout(self.grants.incarnation, 1, 1, 0, FINGERPRINT, (worker,))))
        self.lock = threading.Lock()
        self._listener = Listener("127.0.0.1", port, self._answer, lambda: None)
        self.address = ("127.0.0.1", self._listener.port)

    def _answer(self, message, respond):
        if isinstance(message, self.muted):
            raise RuntimeError("this producer does not answer that")
        if isinstance(message, Hello):
            self.hellos += 1
            return self._welcome
        with self.lock:
            reply = self.grants.answer(message, lambda reply: respond(encode(reply)))
        return None if reply is None else encode(reply)

    def grant(self, blocks=(3, 4, 5), readers=(READER,)):
        with self.lock:
            grant = self.grants.offer(draw(), [list(blocks)], BLOCK_TOKENS * len(blocks), draw())
            claim = _claim(self.grants.incarnation, grant, readers)
            granted = self.grants.answer(claim)
            assert isinstance(granted, Granted)
        return granted, claim

    def order(self, name="d-1", blocks=(3, 4, 5), local=(7, 8, 9), first=0, **change):
        grant, claim = self.grant(blocks)
        fields = {
            "request": name,
            "remote_request": claim.request,
            "address": self.address,
            "incarnation": self.grants.incarnation,
            "claim": claim.claim,
            "grant": grant,
            "local_blocks": [list(local)],
            "first_token": first,
            "last_token": BLOCK_TOKENS * len(blocks),
        }
        if "blocks_told" in change:
            fields["grant"] = msgspec.structs.replace(grant, blocks=change.pop("blocks_told"))
        return Order(**{**fields, **change})

    def take_ended(self):
        with self.lock:
            return self.grants.take_ended()

    def close(self):
        self._listener.close()


class Consumer:
    """One worker: its memory, its reader, and what came out."""

    def __init__(self, timeout=DEADLINE_S):
        self.memory = _make_memory(lambda index: index * 0)
        shards = _make_shards(self.memory)
        layout = EngineLayout(draw(), 1, 1, 0, FINGERPRINT, (WorkerShards(0, 0, shards),))
        self.outcomes: queue.SimpleQueue = queue.SimpleQueue()
        self.contacts: list[float] = []
        self._client = Client("test-acks")
        self.reader = Reader(
            layout=layout,
            make_agent=lambda: Agent(f"consumer-{draw()}"),
            ask=self._client.send,
            on_outcome=self.outcomes.put,
            deadlines=Deadlines(handshake=timeout, read=timeout, ack=timeout),
            on_contact=lambda seconds, *_: self.contacts.append(seconds),
        )
        self.reader.start()

    def load(self, order):
        self.reader.submit(order)
        return self.outcomes.get(timeout=DEADLINE_S)

    def close(self):
        self.reader.close()
        self._client.close()


@pytest.fixture
def parties():
    opened = []

    def make(cls, **options):
        opened.append(cls(**options))
        return opened[-1]

    yield make
    for party in opened:
        party.close()


def _assert_only(consumer, producer, pairs):
    """Local blocks hold the remote ones' bytes, and every other byte is untouched."""
    expected = np.zeros_like(consumer.memory)
    for local, remote in pairs:
        expected[:, local] = producer.memory[:, remote]
    np.testing.assert_array_equal(consumer.memory, expected)


def test_an_order_moves_its_blocks_and_nothing_else_and_ends_the_grant(parties):
    producer, consumer = parties(Producer), parties(Consumer)
    order = producer.order()
    outcome = consumer.load(order)
    assert outcome.failure is None
    assert outcome.producer.incarnation == producer.grants.incarnation
    assert sum(part.bytes for part in outcome.reads) == 3 * len(LAYERS) * HEADS * BLOCK_TOKENS * CELL
    _assert_only(consumer, producer, [(7, 3), (8, 4), (9, 5)])
    assert producer.take_ended() == [order.remote_request]


def test_blocks_found_locally_are_not_written_again(parties):
    producer, consumer = parties(Producer), parties(Consumer)
    assert consumer.load(producer.order(first=2 * BLOCK_TOKENS)).failure is None
    _assert_only(consumer, producer, [(9, 5)])


def test_a_producer_is_met_once_for_any_number_of_orders(parties):
    producer, consumer = parties(Producer), parties(Consumer)
    for number in range(20):
        consumer.reader.submit(producer.order(f"d-{number}"))
    names = {consumer.outcomes.get(timeout=DEADLINE_S).order.request for _ in range(20)}
    assert names == {f"d-{number}" for number in range(20)}
    assert producer.hellos == len(consumer.contacts) == 1


def test_the_phases_of_a_load_are_all_of_its_time(parties):
    producer, consumer = parties(Producer), parties(Consumer)
    first, second = (consumer.load(producer.order(f"d-{number}")) for number in range(2))
    for outcome in (first, second):
        assert list(outcome.phases) == ["connect", "read", "ack"]
        assert sum(outcome.phases.values()) == pytest.approx(outcome.seconds)
        assert all(seconds > 0 for seconds in outcome.phases.values())
    assert first.phases["connect"] >= consumer.contacts[0] > second.phases["connect"]


def test_a_load_that_never_read_has_no_time_of_reading(parties):
    producer, consumer = parties(Producer, mute=(Hello,)), parties(Consumer, timeout=0.5)
    outcome = consumer.load(producer.order())
    assert list(outcome.phases) == ["connect", "ack"]
    assert outcome.phases["connect"] >= 0.5
    assert consumer.contacts == []


def test_a_read_the_producer_does_not_vouch_for_fails(parties):
    """The lease ended while the bytes moved: they may be another request's."""
    producer, consumer = parties(Producer), parties(Consumer)
    order = producer.order(claim=draw())
    outcome = consumer.load(order)
    assert "does not vouch" in outcome.failure


def test_a_producer_that_stops_answering_acknowledgements_fails_the_load(parties):
    producer, consumer = parties(Producer, mute=(Ack,)), parties(Consumer, timeout=0.5)
    assert "no answer" in consumer.load(producer.order()).failure


def test_a_producer_that_never_says_hello_fails_the_load(parties):
    producer, consumer = parties(Producer, mute=(Hello,)), parties(Consumer, timeout=0.5)
    assert "handshake failed" in consumer.load(producer.order()).failure


def test_a_pair_that_cannot_work_fails_with_every_reason_and_frees_the_blocks(parties):
    producer = parties(Producer, layers=[LAYERS[0], "model.layers.7.attn"], dtype="float16")
    consumer = parties(Consumer)
    order = producer.order()
    failure = consumer.load(order).failure
    assert "model.layers.0.attn: dtype differs" in failure
    assert "model.layers.1.attn: the producer does not hold this layer" in failure
    assert producer.take_ended() == [order.remote_request]
    assert not consumer.memory.any()


@pytest.mark.parametrize(
    "change",
    [
        {"blocks_told": [[3]]},
        {"blocks_told": [[3, 4, BLOCKS]]},
        {"blocks_told": [[3, 4, -1]]},
        {"blocks_told": []},
        {"blocks_told": [[3, 0, 5]]},
        {"blocks_told": [[3, 2**70, 5]]},
        {"local_blocks": [[7]]},
        {"first_token": 5},
    ],
    ids=lambda change: str(change),
)
def test_blocks_outside_the_cache_fail_the_load_before_a_byte_moves(parties, change):
    producer, consumer = parties(Producer), parties(Consumer)
    assert consumer.load(producer.order(**change)).failure
    assert not consumer.memory.any()
    assert consumer.load(producer.order("next")).failure is None


def test_an_incarnation_that_is_gone_from_its_address_fails_the_load(parties):
    producer, consumer = parties(Producer), parties(Consumer)
    assert "handshake failed" in consumer.load(producer.order(incarnation=draw())).failure


def test_a_producer_restarted_on_its_address_is_met_anew(parties):
    first, consumer = parties(Producer), parties(Consumer)
    assert consumer.load(first.order()).failure is None
    first.close()
    second = parties(Producer, port=first.address[1])
    second.memory += 1
    consumer.memory[:] = 0
    assert consumer.load(second.order()).failure is None
    _assert_only(consumer, second, [(7, 3), (8, 4), (9, 5)])


def test_two_producers_are_read_side_by_side(parties):
    producers, consumer = [parties(Producer), parties(Producer)], parties(Consumer)
    producers[1].memory += 100
    consumer.reader.submit(producers[0].order("a", blocks=(3,), local=(7,)))
    consumer.reader.submit(producers[1].order("b", blocks=(3,), local=(8,)))
    assert [consumer.outcomes.get(timeout=DEADLINE_S).failure for _ in range(2)] == [None, None]
    np.testing.assert_array_equal(consumer.memory[:, 7], producers[0].memory[:, 3])
    np.testing.assert_array_equal(consumer.memory[:, 8], producers[1].memory[:, 3])


def test_a_dead_producer_does_not_delay_a_living_one(parties):
    dead, alive = parties(Producer, mute=(Hello,)), parties(Producer)
    consumer = parties(Consumer, timeout=5.0)
    consumer.reader.submit(dead.order("dead"))
    consumer.reader.submit(alive.order("alive"))
    assert consumer.outcomes.get(timeout=DEADLINE_S).order.request == "alive"
    assert consumer.outcomes.get(timeout=DEADLINE_S).failure


def test_a_look_at_reads_under_way_comes_back_however_short_its_wait():
    """SimpleQueue's does not on CPython 3.11: a load was stuck until the next one came."""
    agent = SimpleNamespace(register=lambda _: None, metadata=lambda: b"")
    shards = _make_shards(_make_memory(lambda index: index * 0))
    layout = EngineLayout(draw(), 1, 1, 0, FINGERPRINT, (WorkerShards(0, 0, shards),))
    reader = Reader(layout=layout, make_agent=lambda: agent, ask=None, on_outcome=None)
    reader.open()

    def look():
        for _ in range(20_000):
            reader.turn(2e-6)
            reader._inbox.put(lambda: None)
            reader.turn(None)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


# First contact ahead of need


def _met(consumer):
    return {
        incarnation: peer for incarnation, peer in consumer.reader._peers.items() if peer.layout and not peer.active
    }


def test_a_producer_that_was_sighted_is_connected_before_anything_is_loaded_from_it(parties):
    producer, consumer = parties(Producer), parties(Consumer)
    consumer.reader.meet(producer.address, producer.grants.incarnation)
    consumer.reader.meet(producer.address, producer.grants.incarnation)
    _wait_for(lambda: producer.grants.incarnation in _met(consumer))
    assert (consumer.memory == 0).all(), "the warm-up read goes elsewhere"
    assert consumer.load(producer.order()).failure is None
    assert producer.hellos == 1
    _assert_only(consumer, producer, [(7, 3), (8, 4), (9, 5)])


def test_a_sighted_producer_that_is_none_delays_and_costs_nothing(parties):
    producer, consumer = parties(Producer), parties(Consumer)
    consumer.reader.meet(("127.0.0.1", 9), draw())
    consumer.reader.meet(producer.address, draw())
    assert consumer.load(producer.order()).failure is None
    _wait_for(lambda: set(consumer.reader._peers) == {producer.grants.incarnation})


def test_made_up_addresses_are_few_at_a_time_and_needed_ones_are_met_all_the_same(parties):
    silent, producer, consumer = parties(Producer, mute=(Hello,)), parties(Producer), parties(Consumer)
    for _ in range(3 * reader_module.MOST_STRANGERS):
        consumer.reader.meet(silent.address, draw())
    assert consumer.load(producer.order()).failure is None
    assert len(consumer.reader._peers) <= reader_module.MOST_STRANGERS + 1


# Prefills that go on


class Prefill:
    """One that a producer's worker computes, as far as it is told to."""

    def __init__(self, producer, blocks=(3, 4, 5), local=(7, 8, 9)):
        self.producer, self.blocks, self.local = producer, list(blocks), list(local)
        self.tokens, self.life = BLOCK_TOKENS * len(blocks), 0
        self.transfer = Transfer(draw(), draw())
        producer.grants.open(self.transfer.name, self.transfer, self.tokens, "a" * 32)
        self.told(0)

    def told(self, ready, life=0, blocks=None):
        with self.producer.lock:
            self.producer.grants.progress(self.transfer.name, life, [list(blocks or self.blocks)], ready)

    def finish(self):
        with self.producer.lock:
            self.producer.grants.offer(self.transfer.name, [self.blocks], self.tokens, "a" * 32)

    def order(self):
        names = (self.producer.grants.incarnation, self.transfer.name, self.transfer.nonce, draw(), draw())
        claim = Claim(*names, [READER], self.tokens, "a" * 32, ahead=True)
        with self.producer.lock:
            granted = self.producer.grants.answer(claim)
        where = ("d-1", claim.request, self.producer.address, claim.incarnation, claim.claim)
        return Order(*where, granted, [self.local], 0, self.tokens)


def _wait_for(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "did not come about"
        time.sleep(0.001)


def test_what_is_ready_is_read_while_the_rest_is_computed(parties):
    producer, consumer = parties(Producer), parties(Consumer)
    prefill = Prefill(producer)
    consumer.reader.submit(prefill.order())
    prefill.told(2 * BLOCK_TOKENS + 5)
    _wait_for(lambda: (consumer.memory[:, 8] == producer.memory[:, 4]).all())
    _assert_only(consumer, producer, [(7, 3), (8, 4)])
    assert consumer.outcomes.empty()
    prefill.finish()
    outcome = consumer.outcomes.get(timeout=DEADLINE_S)
    assert outcome.failure is None
    assert sum(part.bytes for part in outcome.reads) == 3 * len(LAYERS) * HEADS * BLOCK_TOKENS * CELL
    _assert_only(consumer, producer, [(7, 3), (8, 4), (9, 5)])
    assert producer.take_ended() == [prefill.transfer.name]


def test_a_prefill_that_began_anew_is_read_anew(parties):
    producer, consumer = parties(Producer), parties(Consumer)
    prefill = Prefill(producer)
    consumer.reader.submit(prefill.order())
    prefill.told(2 * BLOCK_TOKENS)
    _wait_for(lambda: (consumer.memory[:, 8] == producer.memory[:, 4]).all())
    prefill.told(0, life=1, blocks=(1, 2, 6))
    prefill.blocks = [1, 2, 6]
    prefill.finish()
    assert consumer.outcomes.get(timeout=DEADLINE_S).failure is None
    _assert_only(consumer, producer, [(7, 1), (8, 2), (9, 6)])


def test_a_prefill_that_fails_fails_its_load(parties):
    producer, consumer = parties(Producer), parties(Consumer)
    prefill = Prefill(producer)
    consumer.reader.submit(prefill.order())
    prefill.told(BLOCK_TOKENS)
    with producer.lock:
        producer.grants.close(prefill.transfer.name)
    assert "does not go on with the prefill" in consumer.outcomes.get(timeout=DEADLINE_S).failure


def test_a_producer_that_falls_silent_in_the_middle_of_a_prefill_fails_the_load_in_time(parties, monkeypatch):
    monkeypatch.setattr(reader_module, "WAIT_S", 0.1)
    producer, consumer = parties(Producer), parties(Consumer, timeout=0.5)
    prefill = Prefill(producer)
    producer.muted = (Follow,)
    consumer.reader.submit(prefill.order())
    assert "no answer within" in consumer.outcomes.get(timeout=DEADLINE_S).failure
