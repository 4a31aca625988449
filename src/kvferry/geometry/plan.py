"""Which remote worker a worker reads which heads of which layer from: the intersection of boxes.

Tensor and pipeline parallelism, replicas, latent caches and sizes that do not divide are all this one intersection.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from kvferry.errors import LayoutError
from kvferry.geometry.check import uncovered
from kvferry.geometry.layout import EngineLayout, LayerShard, WorkerShards
from kvferry.geometry.span import Span


@dataclass(frozen=True, slots=True)
class Piece:
    """Heads of one layer that move from a remote shard to a local one."""

    remote: LayerShard
    local: LayerShard
    heads: Span


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What one worker reads: for each index into the producer's ``workers``, its pieces."""

    reads: dict[int, tuple[Piece, ...]]

    @property
    def block_tokens(self) -> int:
        """The smallest number of tokens that are whole blocks in every shard on both sides."""
        pieces = (piece for pieces in self.growing.values() for piece in pieces)
        return math.lcm(*{shard.manager_block_tokens for piece in pieces for shard in (piece.local, piece.remote)})

    @property
    def growing(self) -> dict[int, tuple[Piece, ...]]:
        """``reads`` without recurrent states, which stand for no token before the last has been computed."""
        return {
            index: tuple(piece for piece in pieces if piece.local.kind != "state")
            for index, pieces in self.reads.items()
        }

    @property
    def exact(self) -> bool:
        """There are recurrent states: what they were after an earlier token cannot be read from them."""
        return any(piece.local.kind == "state" for pieces in self.reads.values() for piece in pieces)


def plan(producer: EngineLayout, reader: WorkerShards) -> ReadPlan:
    """Cover every head of every shard of ``reader`` exactly once from the workers of ``producer``.

    Layers of a drafter that ``producer`` does not have are left out.

    Where several workers hold the same heads, readers spread over them by their tensor parallel rank.

    Raises:
        LayoutError: a layer or a head that no worker of ``producer`` holds. ``check`` gives all such reasons.
    """
    holders = producer.holders()
    reads: dict[int, list[Piece]] = defaultdict(list)
    for local in reader.shards:
        if local.draft and local.layer not in holders:
            continue
        replicas = _replicas(holders.get(local.layer, []))
        missing = uncovered(local.heads, list(replicas))
        if missing:
            raise LayoutError(f"{local.layer}: no worker of engine {producer.incarnation} holds heads {missing}")
        at = local.heads.start
        for heads in sorted(replicas):
            # Starting where the last piece ended keeps each head covered once, should ranges ever overlap.
            part = heads & Span(at, local.heads.stop)
            if part:
                index, remote = replicas[heads][reader.tp_rank % len(replicas[heads])]
                reads[index].append(Piece(remote, local, part))
                at = part.stop
    return ReadPlan({index: tuple(pieces) for index, pieces in sorted(reads.items())})


def _replicas(holders: list[tuple[int, LayerShard]]) -> dict[Span, list[tuple[int, LayerShard]]]:
    """Holders of one layer by the heads they hold; several under one range are replicas of each other."""
    replicas: dict[Span, list[tuple[int, LayerShard]]] = defaultdict(list)
    for index, shard in holders:
        replicas[shard.heads].append((index, shard))
    return replicas
