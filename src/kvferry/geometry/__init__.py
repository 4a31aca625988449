"""The geometry of KV caches: who holds which cells, and how cells of one engine become cells of another.

Pure data and functions; numpy is the only dependency.
"""

from kvferry.geometry.check import check, compatibility, left_out
from kvferry.geometry.descriptors import Descriptors, descriptors
from kvferry.geometry.layout import (
    NULL_BLOCK,
    EngineLayout,
    Fingerprint,
    LayerShard,
    WorkerShards,
    layout_label,
    memory_regions,
)
from kvferry.geometry.plan import Piece, ReadPlan, plan
from kvferry.geometry.span import ALL_TOKENS, Span, TokenShare, heads_of_rank

__all__ = [
    "ALL_TOKENS",
    "NULL_BLOCK",
    "Descriptors",
    "EngineLayout",
    "Fingerprint",
    "LayerShard",
    "Piece",
    "ReadPlan",
    "Span",
    "TokenShare",
    "WorkerShards",
    "check",
    "compatibility",
    "descriptors",
    "heads_of_rank",
    "layout_label",
    "left_out",
    "memory_regions",
    "plan",
]
