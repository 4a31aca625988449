"""Shards and engines for the tests of the geometry; their addresses point nowhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvferry.geometry import EngineLayout, Fingerprint, LayerShard, Span, TokenShare, WorkerShards, heads_of_rank

FINGERPRINT = Fingerprint(model="tiny-qwen2", protocol=1, software="0.32")
LAYER_BYTES = 1 << 24


def make_shard(**changes: Any) -> LayerShard:
    """A shard of 2 of 4 heads in 8 blocks of 16 tokens, stored block, head, token; strides follow the sizes given."""
    shape: dict[str, Any] = {
        "layer": "model.layers.0.self_attn.attn",
        "kind": "attention",
        "heads": Span(0, 2),
        "total_heads": 4,
        "block_tokens": 16,
        "num_blocks": 8,
        "cell_bytes": 32,
        "dtype": "float32",
        "packing": "plain",
        "opaque": False,
        "group": 0,
        "address": 1 << 32,
        **changes,
    }
    heads = shape["heads"][1] - shape["heads"][0]
    shape.setdefault("token_stride", shape["cell_bytes"])
    shape.setdefault("head_stride", shape["token_stride"] * shape["block_tokens"])
    shape.setdefault("block_stride", shape["head_stride"] * heads)
    return LayerShard(**shape)


def make_engine(
    tp: int, stages: Sequence[int], heads: int = 4, context: tuple[int, int] = (1, 1), **changes: Any
) -> EngineLayout:
    """An engine of ``tp`` ranks x ``len(stages)`` stages; stage ``i`` holds ``stages[i]`` layers.

    ``context``: ranks that share out the tokens, and how many at a time.
    """
    size, interleave = context
    workers: list[WorkerShards] = []
    for pp_rank, count in enumerate(stages):
        first = sum(stages[:pp_rank])
        for tp_rank in range(tp):
            base = (1 + len(workers)) << 32
            shards = [
                make_shard(
                    layer=f"model.layers.{layer}.self_attn.attn",
                    heads=heads_of_rank(heads, tp, tp_rank),
                    total_heads=heads,
                    address=base + layer * LAYER_BYTES,
                    share=TokenShare(size, tp_rank % size, interleave),
                    **changes,
                )
                for layer in range(first, first + count)
            ]
            workers.append(WorkerShards(pp_rank, tp_rank, tuple(shards), agent=f"{pp_rank}/{tp_rank}".encode()))
    return EngineLayout("incarnation", tp, len(stages), 0, FINGERPRINT, tuple(workers))


def with_shards(engine: EngineLayout, **changes: Any) -> EngineLayout:
    """``engine`` with the same fields changed in every shard."""
    workers = [
        replace(worker, shards=tuple(replace(shard, **changes) for shard in worker.shards)) for worker in engine.workers
    ]
    return replace(engine, workers=tuple(workers))
