"""The KV cache of one worker in real memory."""

import mmap
from collections.abc import Sequence
from dataclasses import replace
from zlib import crc32

import numpy as np

from kvferry.geometry import LayerShard, WorkerShards

MAP_NORESERVE = 0x4000  # Linux; Python's mmap does not name it


class Cache:
    """Memory for what ``described`` holds; that its addresses are made up does not matter.

    Args:
        reserve: promise the memory only; it is there where it is touched.

    Attributes:
        memory: bytes, shape (n,), one layer after the other.
        worker: the description with the real addresses.
    """

    def __init__(self, described: WorkerShards, reserve: bool = False) -> None:
        sizes = [shard.extent.size for shard in described.shards]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (MAP_NORESERVE if reserve else 0)
        self.memory = np.frombuffer(mmap.mmap(-1, sum(sizes), flags), np.uint8)
        starts = np.cumsum([0, *sizes[:-1]])
        self._layers = [self.memory[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        shards = tuple(
            replace(shard, address=int(layer.ctypes.data), memory="DRAM")
            for shard, layer in zip(described.shards, self._layers, strict=True)
        )
        self.worker = replace(described, shards=shards)

    def fill(self) -> None:
        """Give every (layer, head, block) bytes by which it is known."""
        for shard, cells in self._cells():
            cells[:] = _mark(shard, np.arange(shard.num_blocks))[:, :, None]

    def wrong_bytes(self, local: Sequence[int], remote: Sequence[int]) -> int:
        """Bytes in the ``local`` blocks that are not those of the ``remote`` blocks of a filled cache."""
        ids = np.asarray(remote)
        return sum(
            int((cells[local] != _mark(shard, ids)[:, :, None]).sum()) for shard, cells in self._cells() if len(local)
        )

    def _cells(self) -> list[tuple[LayerShard, np.ndarray]]:
        """Every shard with its memory, shape (blocks, heads, bytes)."""
        return [
            (shard, layer.reshape(shard.num_blocks, shard.heads.size, -1))
            for shard, layer in zip(self.worker.shards, self._layers, strict=True)
        ]


def _mark(shard: LayerShard, blocks: np.ndarray) -> np.ndarray:
    """Shape (blocks, heads); never 0."""
    heads = np.arange(*shard.heads)
    return ((crc32(shard.layer.encode()) + blocks[:, None] * 7 + heads[None, :] * 101) % 251 + 1).astype(np.uint8)
