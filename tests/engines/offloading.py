"""vLLM's OffloadingConnector on a CPU: everything is its own but the copy, which it makes with CUDA streams only.

Loaded by name: ``kv_connector_extra_config: {"spec_module_path": "tests.engines.offloading", "spec_name": ...}``.
"""

from __future__ import annotations

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class CopyingSpec(CPUOffloadingSpec):
    """vLLM's own tier in host memory, with a worker that a CPU can run."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return CopyingWorker(kv_caches, self.num_chunks)


class CopyingWorker(OffloadingWorker):
    """Copies blocks at once, and reports them as ended when it is next asked."""

    def __init__(self, caches: CanonicalKVCaches, chunks: int) -> None:
        self._groups = caches.group_data_refs
        self._here = [cache.tensor for cache in caches.tensors]
        self._there = [torch.empty((chunks, cache.shape[1]), dtype=cache.dtype) for cache in self._here]
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec) -> bool:
        for tensor, here, there in self._pairs(src_spec, dst_spec.block_ids):
            self._there[tensor][there] = self._here[tensor][here]
        return self._end(job_id, len(src_spec.block_ids))

    def submit_load(self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        for tensor, here, there in self._pairs(dst_spec, src_spec.block_ids):
            self._here[tensor][here] = self._there[tensor][there]
        return self._end(job_id, len(dst_spec.block_ids))

    def _pairs(self, spec: GPULoadStoreSpec, chunks: np.ndarray):
        """Of each cache that is meant: its number, block ids in it, and chunk ids in the tier."""
        at = 0
        for size, refs in zip(spec.group_sizes, self._groups, strict=True):
            blocks = slice(at, at + size)
            at += size
            for ref in refs:
                yield ref.tensor_idx, spec.block_ids[blocks], chunks[blocks]

    def _end(self, job_id: int, blocks: int) -> bool:
        size = blocks * sum(cache.shape[1] for cache in self._here)
        self._ended.append(TransferResult(job_id, True, transfer_size=size, transfer_time=1e-6))
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """What was submitted has ended."""
