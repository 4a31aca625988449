"""Host staging: what moves is a copy of the cache in host memory, where NIXL cannot reach the device's own.

A prefill's blocks are copied there with the step that computes them, so whatever may be read is in it; the blocks of a
load are copied from there before the load is reported. Nobody else needs to know: the copy has the shapes and strides
of the cache, and it is what the worker describes to its peers.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import psutil
import torch

from kvferry.errors import UnsupportedError
from kvferry.geometry import LayerShard, Span
from kvferry.geometry.descriptors import Blocks
from kvferry.geometry.layout import NULL_BLOCK
from kvferry.geometry.span import Ints

logger = logging.getLogger(__name__)

PIECE_BYTES = 8 << 20
"""Of a layer, copied at a time. The device has little memory to spare beside its cache, and in host memory a temporary
of this size is used again: on one core 3.7 GB/s were gathered and put back, and 1.4 with pieces of 64 MiB."""

Caches = Mapping[str, torch.Tensor]
"""Layer name to its view, logically (blocks, heads, tokens, content)."""


def mirrored(caches: Caches) -> dict[str, torch.Tensor]:
    """The same tensors in host memory, all zero: sizes, strides, offsets, and which of them share a storage.

    It is ordinary memory: blocks lie apart, so each copy gathers them into a temporary first, and only that would be
    faster for being pinned.

    Raises:
        UnsupportedError: there is not as much host memory.
    """
    sizes = {_storage(cache): cache.untyped_storage().nbytes() for cache in caches.values()}
    total, left = sum(sizes.values()) / 2**30, psutil.virtual_memory().available / 2**30
    logger.info("the KV cache moves by way of host memory, of which this worker takes %.1f GiB", total)
    try:
        if total > left:
            raise MemoryError
        copies = {key: torch.zeros(size, dtype=torch.uint8).untyped_storage() for key, size in sizes.items()}
    except (MemoryError, RuntimeError) as error:  # torch raises the latter
        raise UnsupportedError(
            f"host staging takes as much host memory as the KV cache, which is {total:.1f} GiB on this worker, and "
            f"{left:.1f} GiB are available; make the cache smaller (--kv-cache-memory-bytes), or remove "
            "kv_buffer_device from --kv-transfer-config"
        ) from error
    return {
        layer: torch.empty(0, dtype=cache.dtype).set_(
            copies[_storage(cache)], cache.storage_offset(), cache.size(), cache.stride()
        )
        for layer, cache in caches.items()
    }


def _storage(cache: torch.Tensor) -> int:
    return cache.untyped_storage().data_ptr()


@dataclass(frozen=True, slots=True)
class _Layer:
    """One that is cached: its first shard, its cache and the copy."""

    shard: LayerShard
    device: torch.Tensor
    host: torch.Tensor


class Staging:
    """Copies blocks between a worker's cache and its copy in host memory.

    The copies are torch's indexing, since vLLM's own (``copy_kv_blocks``) exists for some platforms only, takes all
    layers for all blocks, and knows neither null blocks nor where in a block a load begins.

    Args:
        device, host: the cache, and what ``mirrored`` made of it.
        shards: of ``host``, by layer.
    """

    def __init__(self, device: Caches, host: Caches, shards: Mapping[str, Sequence[LayerShard]]) -> None:
        self._families: dict[tuple[object, ...], list[_Layer]] = defaultdict(list)
        for layer, (shard, *_) in shards.items():
            family = (shard.group, shard.kind == "state", shard.block_tokens, shard.split, shard.share)
            self._families[family].append(_Layer(shard, _integers(device[layer]), _integers(host[layer])))

    @torch.inference_mode()  # as the cache was made: elsewhere torch refuses to write to it
    def to_host(self, blocks: Blocks, tokens: Span) -> None:
        """Copy the blocks that hold ``tokens``, after everything that was queued on the current stream; waits for it.

        Args:
            blocks: of the request, by KV cache group, from token 0 on.
        """
        for layers in self._families.values():
            rows, _ = rows_of(layers[0].shard, blocks, tokens)
            for layer in layers:
                _copy(layer.device, layer.host, rows)

    @torch.inference_mode()
    def to_device(self, blocks: Blocks, tokens: Span, without: Collection[str] = ()) -> None:
        """Copy what was loaded: all of the blocks that hold ``tokens``, from the first token on; waits for the end.

        Args:
            blocks: of the request, by KV cache group, from token 0 on.
            without: shards' names of layers that were left out.
        """
        device = None
        for layers in self._families.values():
            rows, skipped = rows_of(layers[0].shard, blocks, tokens)
            for layer in layers:
                if layer.shard.layer not in without:
                    _copy(layer.host, layer.device, rows, skipped)
                    device = layer.device.device
        if device is not None and device.type != "cpu":
            # Whoever is told that the blocks are there may use another stream.
            torch.accelerator.current_stream(device).synchronize()


def _integers(cache: torch.Tensor) -> torch.Tensor:
    """The same bytes as the widest integers: fewer to copy, and of a type that torch can index on every device."""
    view = cache.view(torch.uint8)
    numbers = (view.shape[-1], view.storage_offset(), *view.stride()[:-1])
    fitting = (
        dtype for dtype in (torch.int64, torch.int32, torch.int16) if not any(n % dtype.itemsize for n in numbers)
    )
    return view.view(next(fitting, torch.uint8))


def rows_of(shard: LayerShard, blocks: Blocks, tokens: Span) -> tuple[Ints, int]:
    """Where a layer like ``shard`` keeps ``tokens``: (kernel) block numbers in its cache, and how many tokens at the
    beginning of the first come before them.

    The blocks go to the end of the last one that the KV cache manager counts. Null blocks are none. Of a recurrent
    state, it is the block of the last token.
    """
    first, size = tokens.start, shard.block_tokens
    if shard.kind == "state" and tokens:
        first = tokens.stop - 1
    place = shard.share.before(first)
    stop = -(-tokens.stop // shard.manager_block_tokens) * shard.split if tokens else 0
    numbers = np.arange(place // size, stop, dtype=np.int64)
    ids = np.asarray(blocks[shard.group], dtype=np.int64)[numbers // shard.split]
    held = ids != NULL_BLOCK
    rows = (ids * shard.split + numbers % shard.split)[held]
    inside = place % size if shard.kind != "state" and len(held) and held[0] else 0
    return rows, inside


def _copy(source: torch.Tensor, target: torch.Tensor, rows: Ints, skipped: int = 0) -> None:
    """Copy rows; of the first, not the first ``skipped`` tokens, which are there already."""
    if skipped:
        first, rows = int(rows[0]), rows[1:]
        target[first, :, skipped:] = source[first, :, skipped:].to(target.device)
    if len(rows):
        at_once = max(1, PIECE_BYTES // (source[0].numel() * source.element_size()))
        for part in torch.from_numpy(rows).split(at_once):
            gathered = source.index_select(0, part.to(source.device)).to(target.device)
            target.index_copy_(0, part.to(target.device), gathered)
