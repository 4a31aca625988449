"""Growth is measured with the real reader; only its shape is held here, never a time."""

from kvferry.bench.transfer.growth import BLOCKS_MOVED, CACHE_BLOCKS, PEERS, POINTS, points
from kvferry.cluster.blueprint import CacheShape

SHAPE = CacheShape("latent", 2, 1, 64, "bfloat16")
"""Neighbouring blocks of a latent cache would be one range; with heads that are split they never are."""


def test_descriptors_grow_with_what_moves_and_with_nothing_else():
    found = list(points(SHAPE, 16))
    assert len(found) == POINTS
    by_axis = {axis: [one for one in found if one.axis == axis] for axis in dict.fromkeys(one.axis for one in found)}
    moved, cache, peers = by_axis.values()
    assert [one.value for one in moved] == list(BLOCKS_MOVED)
    assert [one.descriptors for one in moved] == [2 * blocks for blocks in BLOCKS_MOVED]
    assert [one.value for one in cache] == list(CACHE_BLOCKS)
    assert [one.value for one in peers] == list(PEERS)
    assert len({one.descriptors for one in cache[1:] + peers}) == 1
    assert all(one.post_s > 0 for one in found)
