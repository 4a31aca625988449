"""Pairs of layouts between real processes, with real NIXL and a real listener."""

import asyncio
import contextlib
from dataclasses import replace

import msgspec
import psutil
import pytest

from kvferry.bench.transfer import pair as pairs
from kvferry.bench.transfer.acks import acks
from kvferry.bench.transfer.contact import first_contact
from kvferry.bench.transfer.pair import LOCAL_SEED, REMOTE_SEED, REPEATS, at_once, started, wholes
from kvferry.bench.transfer.question import Pair, Question, Transport
from kvferry.bench.transfer.rounds import rounds, samples_expected
from kvferry.cluster.blueprint import CacheShape
from kvferry.cluster.spec import Layout
from kvferry.errors import TransferError

SHAPE = CacheShape("attention", 4, 4, 64, "bfloat16")
LATENT = CacheShape("latent", 4, 1, 144, "bfloat16")
TOKENS = 333


def _question(*texts, shape=SHAPE, **change):
    return Question(shape, tuple(map(Pair.parse, texts)), **{"tokens": (TOKENS,), "rounds": 1, **change})


async def _collect(source):
    return [one async for one in source]


def _children():
    return psutil.Process().children(recursive=True)


TIMES = (
    *("seconds", "ceiling_s", "ranges_s", "copy_s", "post_s", "gap_s", "quiet_gap_s"),
    *("readers_cpu_s", "ceiling_cpu_s", "ranges_cpu_s", "contact_s"),
)


@pytest.fixture
def quiet(monkeypatch):
    monkeypatch.setattr(pairs, "QUIET_S", 0.01)


@pytest.mark.parametrize("transport", [Transport.SHM, Transport.TCP])
def test_an_unequal_pair_is_measured_in_every_respect(quiet, transport):
    (sample, *others) = asyncio.run(_collect(rounds(_question("tp=2,pp=2:tp=3", transport=transport))))
    assert len(others) == REPEATS - 1
    assert (sample.pair, sample.tokens, sample.readers, sample.producers) == ("tp2pp2 -> tp3", TOKENS, 3, 4)
    assert sample.bytes == TOKENS * SHAPE.bytes_per_token
    assert sample.descriptors > 3
    for name in TIMES:
        assert 0 < getattr(sample, name) < 10, name
    assert sample.post_s < sample.seconds


def test_the_ranges_alone_are_those_of_the_load():
    async def wrong_after(reading):
        question = _question("tp=2:tp=3")
        (pair,) = question.pairs
        async with started(question.engine(pair.producer), question.engine(pair.consumer), Transport.SHM) as there:
            order = await there.order(TOKENS, *(question.ids(TOKENS, seed) for seed in (REMOTE_SEED, LOCAL_SEED)))
            await reading(there, order)
            whole = TOKENS // question.block_tokens
            wrong = [reader.call("wrong_bytes", int, order=order, whole_blocks=whole) for reader in there.readers]
            return await at_once(*wrong)

    async def nothing(_there, _order):
        pass

    assert all(asyncio.run(wrong_after(nothing)))
    assert not any(asyncio.run(wrong_after(lambda there, order: there.read_ranges(order))))


def test_replicas_and_latent_caches_are_read_whole(quiet):
    """Every rank of a latent cache holds all of it, and reads all of it."""
    (sample, *_) = asyncio.run(_collect(rounds(_question("tp=2:tp=2", shape=LATENT))))
    assert sample.bytes == 2 * TOKENS * LATENT.bytes_per_token


def test_rounds_take_turns(quiet, monkeypatch):
    """Pairs A B A B, so that what the machine does falls on both."""
    monkeypatch.setattr(pairs, "REPEATS", 1)
    question = _question("tp=1:tp=1", "tp=1:pp=2", tokens=(16, 48), rounds=2)
    samples = asyncio.run(_collect(rounds(question)))
    once = [("tp1 -> tp1", 16), ("tp1 -> tp1", 48), ("tp1 -> pp2", 16), ("tp1 -> pp2", 48)]
    assert [(sample.pair, sample.tokens) for sample in samples] == once * 2
    assert samples_expected(question) == 8 * REPEATS


def test_wrong_bytes_are_an_error():
    """A benchmark that moves the wrong blocks has measured nothing."""
    question = _question("tp=1:tp=1")
    one = Layout()

    async def run():
        async with started(question.engine(one), question.engine(one), Transport.AUTO) as there:
            blocks = question.ids(TOKENS, REMOTE_SEED), question.ids(TOKENS, LOCAL_SEED)
            order = await there.order(TOKENS, *blocks)
            await there.require_right(order)
            again = await there.order(TOKENS, *blocks)
            grant = msgspec.structs.replace(again.grant, blocks=[again.grant.blocks[0][::-1]])
            moved = replace(again, grant=grant)
            await there.load(moved)
            (reader,) = there.readers
            assert await reader.call("wrong_bytes", int, order=again, whole_blocks=1) > 0
            with pytest.raises(TransferError, match="does not vouch"):
                await there.load(moved)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("text", "shape", "copies"),
    [
        ("tp=2,pp=2:tp=4", SHAPE, 1),
        ("tp=4:pp=4", SHAPE, 1),
        ("tp=3:tp=2", SHAPE, 1),
        ("tp=4:tp=1", SHAPE, 1),
        ("tp=1:tp=4", LATENT, 4),
    ],
)
def test_a_ceiling_reads_as_many_bytes_from_within_the_same_memory(text, shape, copies):
    """Also where readers of replicas together read more than there is."""
    question = _question(text, shape=shape)
    pair = question.pairs[0]
    producer, consumer = question.engine(pair.producer), question.engine(pair.consumer)
    # One layer after the other, as in real memory.
    workers = tuple(
        replace(
            worker,
            agent=worker.name.encode(),
            shards=tuple(replace(one, address=at * one.extent.size) for at, one in enumerate(worker.shards)),
        )
        for worker in producer.workers
    )
    ids = question.ids(TOKENS, 1), question.ids(TOKENS, 2)
    found = wholes(replace(producer, workers=workers), consumer, ids, TOKENS)
    assert len(found) == len(consumer.workers)
    assert sum(source.bytes for of in found for source in of) == copies * TOKENS * shape.bytes_per_token
    held = {worker.agent: sum(shard.extent.size for shard in worker.shards) for worker in workers}
    for source in (source for of in found for source in of):
        assert 0 <= source.address <= source.address + source.bytes <= held[source.agent]


def test_a_failure_leaves_no_process(monkeypatch):
    """The second of several processes that cannot start takes the others with it."""
    question = _question("tp=2:tp=2")
    engine = question.engine(Layout(tp=2))
    broken = replace(engine, workers=(engine.workers[0], replace(engine.workers[1], shards=())))

    async def run():
        async with started(broken, engine, Transport.AUTO):
            raise AssertionError("it started")

    with pytest.raises(TransferError):
        asyncio.run(run())
    assert _children() == []


def test_cancelling_leaves_no_process(quiet):
    async def run():
        task = asyncio.ensure_future(_collect(rounds(_question("tp=1:tp=2", rounds=100))))
        while len(_children()) < 4:
            await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(run(), 60))
    assert _children() == []


def test_first_contact_does_not_depend_on_the_number_of_blocks():
    """Nothing is made for each block: a producer with a thousand times as many costs the reader as much."""
    layout, shape = Layout(tp=2, pp=2), CacheShape("attention", 4, 4, 512, "bfloat16")
    few, many = (asyncio.run(first_contact(blocks, Transport.AUTO, layout, shape)) for blocks in (1_000, 1_000_000))
    assert (few.ranks, many.ranks) == (4, 4)
    for one in (few, many):
        assert one.seconds < 5
        assert one.bytes_per_peer < 10e6


def test_acknowledgements_are_all_answered_and_end_their_grants():
    found = asyncio.run(acks(per_s=400, seconds=0.5))
    assert found.count == 196  # the first request's four are the warm-up
    assert 0 < found.core < 1
    assert 0 < found.p99_s < 5
