"""Which remote worker a worker reads which heads of which layer from: the intersection of boxes.

Tensor, pipeline and context parallelism, replicas, latent caches and sizes that do not divide are all this one
intersection.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from kvferry.errors import LayoutError
from kvferry.geometry.check import complete, uncovered
from kvferry.geometry.layout import EngineLayout, LayerShard, WorkerShards, by_share
from kvferry.geometry.span import Span


@dataclass(frozen=True, slots=True)
class Piece:
    """Heads of one layer that move from a remote shard to a local one, of the tokens that both hold."""

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
    """Cover every head and token of every shard of ``reader`` exactly once from the workers of ``producer``.

    Layers of a drafter that ``producer`` does not have are left out.

    Where several workers hold the same heads and tokens, readers spread over them by their tensor parallel rank.

    Raises:
        LayoutError: a layer, a head or a token that no worker of ``producer`` holds. ``check`` gives all such reasons.
    """
    holders = producer.holders()
    reads: dict[int, list[Piece]] = defaultdict(list)
    for local in reader.shards:
        if local.draft and local.layer not in holders:
            continue
        held = by_share(holders.get(local.layer, []))
        missing = uncovered(local.heads, list(held))
        if missing:
            raise LayoutError(f"{local.layer}: no worker of engine {producer.incarnation} holds heads {missing}")
        at = local.heads.start
        for heads in sorted(held):
            # Starting where the last piece ended keeps each head covered once, should ranges ever overlap.
            part = heads & Span(at, local.heads.stop)
            if not part:
                continue
            if not complete(held[heads]):
                raise LayoutError(f"{local.layer}: no worker of engine {producer.incarnation} holds some of the tokens")
            at = part.stop
            for share, replicas in held[heads].items():
                if share.meets(local.share):
                    # Ranks of one context are neighbours, and each of them reads from others (or others of them do).
                    turn = reader.tp_rank // min(share.size, local.share.size)
                    index, remote = replicas[turn % len(replicas)]
                    reads[index].append(Piece(remote, local, part))
    return ReadPlan({index: tuple(pieces) for index, pieces in sorted(reads.items())})
