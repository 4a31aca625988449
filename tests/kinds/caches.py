"""Caches as vLLM's GPU backends shape and stride them, on CPU memory, filled with a function of what each byte is.

What is written and expected goes through vLLM's logical views, never through shards, so that shards are what is tested.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvferry.geometry import EngineLayout, Fingerprint, Span, WorkerShards
from kvferry.vllm.cache_view import shards_by_layer
from kvferry.vllm.staging import Staging, mirrored

from .slots import slot_mapping

NULL = 0
POISON = 113
STEP = 20
"""Tokens that are computed at a time."""
SEED = 20240607
MakeSpec = Callable[[int, int, int], KVCacheSpec]
"""A spec from (tensor parallel size, tokens per block, guesses of speculative decoding)."""


@dataclass(frozen=True)
class Kind:
    """A kind of cache.

    Attributes:
        groups: of the model: number of layers, and how to make the spec of one.
        heads: KV heads of a layer over all ranks.
        backend: whose name the layers' attention backend has.
        projections: of a convolution: channels of each over all ranks, and whether every rank holds all of them.
        tp: the sizes that it is cut into.
        dcp: the most ranks that share out tokens, on each side; fewer where fewer hold the same heads.
        interleave: tokens that such a rank takes at a time.
        pcp: ranks of prefill context parallelism, on each side.
        guesses: of speculative decoding, on each side; a recurrent layer keeps a state for each.
    """

    name: str
    groups: tuple[tuple[int, MakeSpec], ...]
    heads: int = 12
    backend: str = "FLASH_ATTN"
    projections: tuple[tuple[int, bool], ...] = ()
    tp: tuple[int, ...] = (1, 2, 3)
    dcp: tuple[int, int] = (1, 1)
    interleave: tuple[int, int] = (1, 1)
    pcp: tuple[int, int] = (1, 1)
    guesses: tuple[int, int] = (0, 0)
    block_tokens: tuple[int, int] = (16, 16)
    layouts: tuple[KVCacheLayout, KVCacheLayout] = (KVCacheLayout.LBHNC, KVCacheLayout.LBHNC)

    @property
    def layers(self) -> list[tuple[str, int]]:
        """Names, and the group of each; groups take turns, so that a stage has layers of all of them or of some."""
        order = sorted((at / count, group) for group, (count, _) in enumerate(self.groups) for at in range(count))
        return [(f"model.layers.{number}.attn", group) for number, (_, group) in enumerate(order)]


@dataclass(frozen=True)
class Side:
    """One engine of a pair: the producer holds the request, the consumer is to load it, from token ``cached`` on.

    Attributes:
        staged: a copy of its caches is moved, which stands for host memory, and the caches for a device's.
    """

    kind: Kind
    producer: bool
    tp: int
    pp: int
    tokens: int
    num_blocks: int = 24
    cached: int = 0
    staged: bool = False

    @property
    def pcp(self) -> int:
        return self.kind.pcp[0 if self.producer else 1]

    @property
    def dcp(self) -> int:
        alike = self.pcp * self.tp // min(self.tp, self.kind.heads)
        return math.gcd(alike, self.kind.dcp[0 if self.producer else 1])

    @property
    def interleave(self) -> int:
        return self.kind.interleave[0 if self.producer else 1]

    @property
    def block_tokens(self) -> int:
        return self.kind.block_tokens[0 if self.producer else 1]

    @property
    def layout(self) -> KVCacheLayout:
        return self.kind.layouts[0 if self.producer else 1]

    @property
    def guesses(self) -> int:
        return self.kind.guesses[0 if self.producer else 1]

    def spec(self, group: int) -> KVCacheSpec:
        return self.kind.groups[group][1](self.tp, self.block_tokens, self.guesses)

    @property
    def blocks(self) -> list[list[int]]:
        """Block ids by group: no two share one, out of a window there is none, and a state has one only, with those of
        guesses behind it."""
        ids = iter(
            np.random.default_rng(SEED + self.num_blocks + self.producer).permutation(np.arange(1, 1000)) % 10**9
        )
        taken: set[int] = set()

        def fresh() -> int:
            while (block := int(next(ids)) % self.num_blocks) in taken or block == NULL:
                pass
            taken.add(block)
            return block

        lists = []
        for group in range(len(self.kind.groups)):
            spec = self.spec(group)
            size = resolve_dcp_kv_block_size(spec, self.dcp)
            window = getattr(spec, "sliding_window", None) or self.tokens
            first = (self.tokens - 1 if isinstance(spec, MambaSpec) else max(0, self.tokens - window + 1)) // size
            count = -(-self.tokens // size) + getattr(spec, "num_speculative_blocks", 0)
            lists.append([NULL if at < first else fresh() for at in range(count)])
        return lists

    def stages(self) -> list[list[tuple[str, int]]]:
        """Layers of each stage; the two sides cut at different places."""
        layers, size = self.kind.layers, len(self.kind.layers)
        if self.pp == 1:
            return [layers]
        cuts = [max(1, size * at // self.pp + (1 if self.producer else 0)) for at in range(1, self.pp)]
        return [layers[first:last] for first, last in zip([0, *cuts], [*cuts, size], strict=True)]

    def workers(self) -> list[Worker]:
        ranks = itertools.product(range(self.pp), range(self.pcp), range(self.tp))
        return [Worker(self, pp, tp, pcp) for pp, pcp, tp in ranks]

    def engine(self, workers: list[Worker], agents: list[bytes]) -> EngineLayout:
        """As the handshake that vLLM collects has it: of replicas by prefill context parallelism, one remains."""
        seen = {
            (worker.pp, worker.tp, worker.pcp * (self.dcp > 1)): replace(worker.published, agent=agent)
            for worker, agent in zip(workers, agents, strict=True)
        }
        published = tuple(seen.values())
        return EngineLayout("0" * 32, self.tp, self.pp, 0, Fingerprint(self.kind.name, 2, "0.32"), published)


@dataclass
class Worker:
    """The cache of one worker. All groups lie over each other in one buffer, as vLLM puts them."""

    side: Side
    pp: int
    tp: int
    pcp: int = 0
    memory: torch.Tensor = field(init=False)
    views: dict[str, torch.Tensor] = field(default_factory=dict)
    staging: Staging | None = None
    published: WorkerShards = field(init=False)
    zeroed: bool = field(init=False)
    """What was in a new block may be no number of its type, so that all of a block has to be loaded."""

    def __post_init__(self) -> None:
        side, layers = self.side, self.side.stages()[self.pp]
        tensors, groups, sizes = [], [], []
        for group in range(len(side.kind.groups)):
            names, spec = [name for name, owner in layers if owner == group], side.spec(group)
            groups.append(KVCacheGroupSpec(names, spec))
            layer_stride, block_stride, *_ = compute_layout_strides(
                spec, side.num_blocks, max(1, len(names)), side.layout
            )
            sizes.append(spec.page_size_bytes * side.num_blocks * len(names))
            tensors.append(KVCacheTensor(sizes[-1], names, layer_stride, block_stride))
        generator = torch.Generator().manual_seed(SEED + 97 * self.pp + self.tp + 31 * self.pcp + side.producer)
        self.memory = torch.randint(-128, 128, (max(sizes),), dtype=torch.int8, generator=generator)
        config = KVCacheConfig(side.num_blocks, [tensor for tensor in tensors if tensor.layers], groups)
        self.zeroed = config.needs_kv_cache_zeroing
        for tensor, group in zip(tensors, groups, strict=True):
            if tensor.layers:
                made = create_kv_cache_views(self.memory, group.kv_cache_spec, side.num_blocks, side.layout, tensor)
                self.views |= zip(tensor.layers, made, strict=True)
        moved = mirrored(self.views) if side.staged else self.views
        layers = shards_by_layer(moved, config, self._vllm_config(), self.tp, self.dcp_rank)
        shards = tuple(shard for shards in layers.values() for shard in shards)
        self.published = WorkerShards(self.pp, self.pcp * side.tp + self.tp, shards)
        if side.producer:
            self.write()
        if side.staged:
            self.staging = Staging(self.views, moved, layers)
            self._stage(moved)

    def _stage(self, copy: dict[str, torch.Tensor]) -> None:
        """A producer's steps. On a consumer, blocks that are to be loaded are in the copy as they are, since not all of
        their bytes are; of no other does it have anything that is true."""
        side, groups = self.side, dict(self.side.kind.layers)
        for view in copy.values():
            _bytes_of(view)[:] = POISON
        if side.producer:
            for start in range(0, side.tokens, STEP):
                self.staged.to_host(side.blocks, Span(start, min(start + STEP, side.tokens)))
            return
        for name, view in self.views.items():
            spec, ids = side.spec(groups[name]), side.blocks[groups[name]]
            size = spec.block_size * (1 if isinstance(spec, MambaSpec) else side.dcp)
            rows = [block for block in ids[side.cached // size :] if block != NULL]
            _bytes_of(copy[name])[rows] = _bytes_of(view)[rows]

    @property
    def staged(self) -> Staging:
        assert self.staging is not None, "this side has no copy"
        return self.staging

    @property
    def dcp_rank(self) -> int:
        """As in vLLM's ``initialize_model_parallel``: a group spans ranks of prefill context parallelism first."""
        return (self.tp * self.side.pcp + self.pcp) % self.side.dcp

    def _vllm_config(self) -> Any:
        kind = self.side.kind
        backend = SimpleNamespace(get_name=lambda: kind.backend)
        module = SimpleNamespace(get_attn_backend=lambda: backend, norm=SimpleNamespace(n_groups=_groups_of(kind)))
        return SimpleNamespace(
            parallel_config=SimpleNamespace(
                tensor_parallel_size=self.side.tp,
                decode_context_parallel_size=self.side.dcp,
                cp_kv_cache_interleave_size=self.side.interleave,
            ),
            model_config=SimpleNamespace(get_total_num_kv_heads=lambda: kind.heads),
            compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(self.views, module)),
        )

    def write(self) -> None:
        """Put the request where it belongs."""
        groups = dict(self.side.kind.layers)
        for name, view in self.views.items():
            spec, blocks = self.side.spec(groups[name]), self.side.blocks[groups[name]]
            number = int(name.split(".")[2])
            if isinstance(spec, MambaSpec):
                self._write_state(number, _bytes_of(view)[blocks[-1 - self.side.guesses], 0, 0], spec)
            else:
                self._write_tokens(number, _bytes_of(view), spec, blocks)

    def _write_tokens(self, layer: int, cells: torch.Tensor, spec: Any, blocks: list[int]) -> None:
        held, slots = spec.num_kv_heads, cells.shape[1]
        shards = min(self.side.tp, 1 if "MLA" in type(spec).__name__ else self.side.kind.heads)
        first = self.tp * shards // self.side.tp * held
        heads = torch.arange(slots) % held + first + (torch.arange(slots) // held) * 1000
        slot = slot_mapping(tuple(blocks), spec.block_size, (self.side.dcp, self.dcp_rank), self.side.interleave)
        block, at = slot // spec.block_size, slot % spec.block_size
        tokens = torch.nonzero(self._moved(block)).flatten()
        cells[block[tokens], :, at[tokens]] = truth(layer, heads, tokens[:, None], cells.shape[3])

    def _moved(self, block: torch.Tensor) -> torch.Tensor:
        """Which tokens move, of those whose blocks are given (negative: another rank's)."""
        tokens = torch.arange(len(block))
        own = block > NULL
        shards = [shard for shard in self.published.shards if shard.kind != "state"]
        if any(shard.opaque for shard in shards):  # all of a block with one of the request's tokens
            end = torch.isin(block, block[: self.side.tokens])
        else:
            end = (tokens < self.side.tokens) | self.zeroed
        return own & end & (tokens >= self.side.cached)

    def _write_state(self, layer: int, page: torch.Tensor, spec: MambaSpec) -> None:
        offset = 0
        for number, (shape, dtype) in enumerate(zip(spec.shapes, spec.dtypes, strict=True)):
            size = math.prod(shape) * dtype.itemsize
            state = page[offset : offset + size].view(*shape, dtype.itemsize)
            offset += size
            if number == 0:
                by_channel = state if is_conv_state_dim_first() else state.transpose(0, 1)
                # The inputs of guesses come after those of the prompt.
                by_channel = by_channel[:, : by_channel.shape[1] - spec.num_speculative_blocks]
                channels = torch.cat(list(self._channels()))
            else:
                by_channel, channels = state, torch.arange(shape[0]) + self.tp * shape[0] + 50_000
            flat = truth(layer, channels, torch.tensor(number), by_channel[0].numel())
            by_channel.copy_(flat.view(by_channel.shape))

    def _channels(self) -> Iterator[torch.Tensor]:
        """Global channels of the convolution, in the order in which this rank has them."""
        for number, (total, repeated) in enumerate(self.side.kind.projections):
            count = total if repeated else total // self.side.tp
            first = 0 if repeated else self.tp * count
            yield torch.arange(first, first + count) + 10_000 * number


def _groups_of(kind: Kind) -> int:
    return 1 if any(repeated for _, repeated in kind.projections) else 4


def _bytes_of(view: torch.Tensor) -> torch.Tensor:
    return view.view(torch.int8)


def truth(layer: int, heads: torch.Tensor, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """``count`` bytes for each of (heads x tokens), different for every (layer, head, token)."""
    cell = heads * 7919 + tokens * 104729 + layer * 15485863
    mixed = (cell[..., None] + 1) * 2654435761 ^ torch.arange(count) * 40503
    return ((mixed ^ mixed >> 15) * 48271 >> 7 & 0xFF).to(torch.uint8).view(torch.int8)
