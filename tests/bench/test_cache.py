"""Caches in real memory know their bytes."""

import pytest

from kvferry.bench.transfer.cache import Cache
from kvferry.cluster.blueprint import Blocks, CacheShape, blueprint
from kvferry.cluster.spec import Layout

SHAPES = [CacheShape("attention", 3, 4, 32, "bfloat16"), CacheShape("latent", 3, 1, 48, "bfloat16")]


def _cache(shape, tp=1, rank=0):
    return Cache(blueprint(shape, Layout(tp=tp), Blocks(4, 9)).workers[rank])


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.kind)
def test_every_layer_has_memory_of_its_own(shape):
    cache = _cache(shape)
    extents = [shard.extent for shard in cache.worker.shards]
    assert [one.stop for one in extents[:-1]] == [one.start for one in extents[1:]]
    assert sum(one.size for one in extents) == len(cache.memory) == 3 * 9 * 4 * shape.heads * shape.cell_bytes
    assert extents[0].start == cache.memory.ctypes.data


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.kind)
def test_blocks_copied_by_hand_are_right_and_one_byte_is_noticed(shape):
    """The check does not go through the code that is measured."""
    there, here = _cache(shape), _cache(shape)
    there.fill()
    assert here.wrong_bytes([1, 2], [5, 3]) == 3 * 2 * 4 * shape.heads * shape.cell_bytes
    for source, target in zip(there.worker.shards, here.worker.shards, strict=True):
        for remote, local in ((5, 1), (3, 2)):
            size = source.block_stride
            begin = source.address - there.memory.ctypes.data + remote * size
            end = target.address - here.memory.ctypes.data + local * size
            here.memory[end : end + size] = there.memory[begin : begin + size]
    assert here.wrong_bytes([1, 2], [5, 3]) == 0
    assert here.wrong_bytes([1, 2], [3, 5]) > 0
    here.memory[here.worker.shards[1].block_stride + here.worker.shards[0].extent.size] ^= 1
    assert here.wrong_bytes([1, 2], [5, 3]) == 1


def test_heads_are_known_by_their_global_number():
    """A reader of TP 2 finds the same heads' marks that TP 1 has filled in."""
    whole, half = _cache(SHAPES[0]), _cache(SHAPES[0], tp=2, rank=1)
    whole.fill()
    half.fill()
    shard, part = whole.worker.shards[0], half.worker.shards[0]
    block = whole.memory[5 * shard.block_stride :][: shard.block_stride]
    mine = half.memory[5 * part.block_stride :][: part.block_stride]
    assert (block[2 * shard.head_stride :] == mine).all()


def test_promised_memory_is_not_taken():
    """Caches larger than any memory can be described, registered and read in parts."""
    cache = Cache(blueprint(SHAPES[0], Layout(), Blocks(16, 1 << 26)).workers[0], reserve=True)
    assert len(cache.memory) > 1 << 38
    cache.memory[1 << 37] = 1
    assert cache.memory[1 << 37] == 1
