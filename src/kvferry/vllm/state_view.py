"""Recurrent states as shards: which bytes of a layer's page are which channels, and which of them a rank holds.

A page holds a convolution's last inputs and, with most kinds, a temporal state (vLLM's
``MambaBase.bind_kv_cache``). Tensor parallelism cuts the temporal state by its first dimension. The convolution's
channels are several projections side by side, each of which is cut by itself: a rank's channels are no range of all
channels, but a range of each projection.

With speculative decoding the convolution has room for the inputs of guesses, behind the last ones of the prompt. They
are nobody's before the first guess, so they are no part of a shard, and the two sides may make unequally many guesses.
Each guess has a page for its state besides, behind that of the prompt in a request's block list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from kvferry.errors import UnsupportedError
from kvferry.geometry import LayerShard, Span

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import MambaSpec

Shape = tuple[int, ...]


def _one(channels: int, _: Shape) -> dict[str, int]:
    return {"x": channels}


def _x_b_c(channels: int, temporal: Shape) -> dict[str, int]:
    x = temporal[0] * temporal[1]
    return {"x": x, "b": (channels - x) // 2, "c": (channels - x) // 2}


def _q_k_v(channels: int, temporal: Shape) -> dict[str, int]:
    v = temporal[0] * temporal[1]
    return {"q": (channels - v) // 2, "k": (channels - v) // 2, "v": v}


PROJECTIONS: dict[str, Callable[[int, Shape], dict[str, int]]] = {
    "MAMBA1": _one,
    "SHORT_CONV": _one,
    "MAMBA2": _x_b_c,
    "GDN_ATTN": _q_k_v,
}
"""By kind of recurrent layer, in the order in which a rank's channels lie: how many of them each projection has. From
the numbers of channels and the shape of the temporal state on a rank, (heads, head size, ...) where they matter. The
order is vLLM's: ``MambaMixer2`` and ``QwenGatedDeltaNetAttention``."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Some channels or heads of one state: where they begin in the page, bytes of each, bytes from one to the next."""

    name: str
    offset: int
    count: int
    cell_bytes: int
    stride: int
    dtype: torch.dtype


def state_shards(
    layer: str, cache: torch.Tensor, spec: MambaSpec, module: Any, rank: int, size: int, **where: Any
) -> Iterator[LayerShard]:
    """The shards of a recurrent layer.

    Args:
        cache: pages as vLLM registers them, (blocks, 1, 1, bytes).
        module: the layer.
        rank, size: tensor parallel.
        where: what is the same in all shards.

    Raises:
        UnsupportedError: a kind of recurrent layer, or a shape, that is not known here.
    """
    kind = spec.mamba_type.name
    if kind not in PROJECTIONS or len(spec.shapes) > 2:
        known = ", ".join(PROJECTIONS)
        raise UnsupportedError(
            f"{layer}: KVFerry cannot move {len(spec.shapes)} states of {kind}; it knows one or two of {known}"
        )
    if cache.dim() != 4 or cache.shape[1:3] != (1, 1) or cache.shape[3] * cache.element_size() < _bytes(spec):
        raise UnsupportedError(f"{layer}: a cache of shape {tuple(cache.shape)} is no page of {_bytes(spec)} bytes")
    for part in _parts(spec):
        copies = size if getattr(spec, "tp_replicated", False) else _copies(part, spec, module, size)
        yield LayerShard(
            layer=f"{layer}.{part.name}",
            kind="state",
            heads=_held(part.count, rank // copies),
            total_heads=part.count * (size // copies),
            block_tokens=spec.block_size,
            num_blocks=cache.shape[0],
            cell_bytes=part.cell_bytes,
            dtype=str(part.dtype).removeprefix("torch."),
            packing=f"{kind}/{'DS' if is_conv_state_dim_first() else 'SD'}",
            opaque=False,
            address=cache.data_ptr() + part.offset,
            block_stride=cache.stride(0) * cache.element_size(),
            head_stride=part.stride,
            token_stride=0,
            **where,
        )


def _held(count: int, index: int) -> Span:
    return Span(index * count, (index + 1) * count)


def _bytes(spec: MambaSpec) -> int:
    return sum(prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))


def _parts(spec: MambaSpec) -> Iterator[_Part]:
    conv, temporal = spec.shapes[0], spec.shapes[1] if len(spec.shapes) > 1 else ()
    size = spec.dtypes[0].itemsize
    channels, width = conv if is_conv_state_dim_first() else conv[::-1]
    rows = width - spec.num_speculative_blocks
    first = 0
    for name, count in PROJECTIONS[spec.mamba_type.name](channels, temporal).items():
        if is_conv_state_dim_first():
            yield _Part(f"conv.{name}", first * width * size, count, rows * size, width * size, spec.dtypes[0])
        else:
            # Row by row, so that a rank's channels are one run of bytes in each.
            for row in range(rows):
                offset = (row * channels + first) * size
                yield _Part(f"conv.{name}.{row}", offset, count, size, size, spec.dtypes[0])
        first += count
    if temporal:
        cell = prod(temporal[1:]) * spec.dtypes[1].itemsize
        yield _Part("temporal", prod(conv) * size, temporal[0], cell, cell, spec.dtypes[1])


def _copies(part: _Part, spec: MambaSpec, module: Any, size: int) -> int:
    """Ranks that hold the same: all of them, where a single group (whose are B and C) is repeated for each rank."""
    if spec.mamba_type.name != "MAMBA2" or part.name.split(".")[1:2] not in (["b"], ["c"]):
        return 1
    return size if module.norm.n_groups == 1 else 1
