"""What vLLM's NixlConnector prepares for each producer worker it meets: a descriptor for every block of every layer.

    python benches/nixl_descriptor_tables.py [--blocks 1000000] [--layers 8] [--ranks 64] [--rounds 3]

vLLM's own function makes the table of one worker of the producer of ``kvferry bench transfer --measure contact``
(TP 8, PP 8, 64 layers: 8 layers and one head for each worker) and NIXL prepares it, between two real agents. The
producer's memory is promised and never touched. KVFerry's figures for the same shape are those of that command.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
from nixl._api import nixl_agent, nixl_agent_config
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker as Worker
from vllm.v1.kv_cache_interface import FullAttentionSpec

MAP_NORESERVE = 0x4000
BLOCK_BYTES = 16 * 512
"""Of one layer and head: 16 tokens, K and V."""
DEVICE = 0
handles: list[Any] = []
"""Kept, as the connector keeps them."""


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def promised(size: int) -> memoryview:
    """Memory that is there where it is touched."""
    return memoryview(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE))


def table(base_addresses: list[int], blocks: int) -> Any:
    """vLLM's: shape (layers * blocks, 3), of address, length and device."""
    worker: Any = SimpleNamespace(
        transfer_topo=True,
        _group_spec_types=[FullAttentionSpec],
        _transfer_layer_region_indices=None,
        _is_region_replicated=lambda _: False,
        block_len_per_layer=[BLOCK_BYTES] * len(base_addresses),
        _stack_descs=Worker._stack_descs,
    )
    plan: Any = SimpleNamespace(source_ranks_per_group=[[0]], rank_offset_factor=0)
    said: Any = SimpleNamespace(
        kv_caches_base_addr=base_addresses,
        region_num_blocks=None,
        num_blocks=blocks,
        device_id=DEVICE,
        block_strides=[BLOCK_BYTES] * len(base_addresses),
    )
    return Worker._build_fa_remote(worker, plan, said, 1)


@dataclass(frozen=True)
class Prepared:
    """One worker's table: descriptors, seconds, and bytes by which this process grew meanwhile and in the end."""

    count: int
    seconds: float
    meanwhile: int
    stay: int


def prepared(consumer: Any, producer: str, base_addresses: list[int], blocks: int) -> Prepared:
    before, began = resident(), time.perf_counter()
    rows = table(base_addresses, blocks)
    descriptors = consumer.get_xfer_descs(rows, "DRAM")
    handles.append(consumer.prep_xfer_dlist(producer, descriptors))
    seconds, meanwhile, count = time.perf_counter() - began, resident() - before, len(rows)
    del rows, descriptors
    return Prepared(count, seconds, meanwhile, resident() - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    # Without its progress thread, which spins and would only take a core from what is measured.
    producer, consumer = (
        nixl_agent(name, nixl_agent_config(enable_prog_thread=False)) for name in ("producer", "consumer")
    )
    memory = promised(options.layers * options.blocks * BLOCK_BYTES)
    start = int(np.frombuffer(memory, np.uint8).ctypes.data)
    bases = [start + layer * options.blocks * BLOCK_BYTES for layer in range(options.layers)]
    producer.register_memory([(base, options.blocks * BLOCK_BYTES, DEVICE, "") for base in bases], "DRAM")
    name = consumer.add_remote_agent(producer.get_agent_metadata())
    found = [prepared(consumer, name, bases, options.blocks) for _ in range(options.rounds)]
    seconds = statistics.median(one.seconds for one in found)
    meanwhile, stay = (max(getattr(one, name) for one in found) / 1e6 for name in ("meanwhile", "stay"))
    print(
        f"{found[0].count:,} descriptors for one worker: {seconds:.2f} s, {meanwhile:.0f} MB, of which {stay:.0f} stay"
    )
    print(f"for all {options.ranks}, one after the other: {options.ranks * seconds:.0f} s")


if __name__ == "__main__":
    main()
