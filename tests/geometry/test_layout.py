from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.geometry import EngineLayout, LayerShard, Span, memory_regions

from .layouts import make_engine, make_shard

BYTES = st.integers(0, 60)
WIRE_INTEGERS = st.integers(-(2**63), 2**64 - 1)


def _make_region_shard(start: int, size: int, memory: str, device: int) -> LayerShard:
    return make_shard(
        heads=Span(0, 1), block_tokens=1, num_blocks=1, cell_bytes=size, address=start, memory=memory, device=device
    )


REGION_SHARDS = st.builds(
    _make_region_shard, BYTES, st.integers(1, 12), st.sampled_from(["DRAM", "VRAM"]), st.integers(0, 1)
)


def _cells(regions: list[tuple[str, int, Span]]) -> list[tuple[str, int, int]]:
    return [(memory, device, byte) for memory, device, extent in regions for byte in range(*extent)]


def test_extent_runs_from_first_to_past_last_cell() -> None:
    """2 heads x 8 blocks x 16 tokens of 32 bytes, packed, make 8 KiB from the address on."""
    shard = make_shard(address=4096)
    assert shard.extent == (4096, 4096 + 8 * 2 * 16 * 32)


def test_extent_of_interleaved_layers_ends_with_the_own_last_cell() -> None:
    """Where other layers lie between the blocks, the gap after the last block is not part of the shard."""
    shard = make_shard(address=4096, block_stride=10_000)
    assert shard.extent == (4096, 4096 + 7 * 10_000 + 2 * 16 * 32)


def test_split_blocks_are_counted_as_the_cache_manager_does() -> None:
    """Kernel blocks of 16 tokens, 4 to a manager's block, are addressed by the manager's ids."""
    shard = make_shard(split=4)
    assert (shard.manager_blocks, shard.manager_block_tokens) == (2, 64)


def test_a_block_id_stands_for_the_tokens_of_all_context_parallel_ranks() -> None:
    """3 ranks with blocks of 2 x 16 tokens each: the cache manager counts 96."""
    shard = make_shard(split=2, share=(3, 1, 4))
    assert (shard.manager_blocks, shard.held_block_tokens, shard.manager_block_tokens) == (4, 32, 96)


@pytest.mark.parametrize(
    "changes",
    [
        {"heads": Span(-1, 1)},
        {"heads": Span(2, 2)},
        {"heads": Span(3, 1)},
        {"heads": Span(3, 5)},
        {"block_tokens": 0},
        {"block_tokens": -16},
        {"num_blocks": 0},
        {"cell_bytes": 0},
        {"cell_bytes": -1, "token_stride": 1},
        {"split": 0},
        {"split": 3},
        {"address": -1},
        {"block_stride": -1},
        {"head_stride": -1},
        {"token_stride": -1},
        {"group": -1},
        {"address": 2**62},
        {"num_blocks": 2**60},
        {"block_stride": 2**63},
        {"opaque": True, "token_stride": 64},
        {"num_blocks": 1, "block_stride": 2**63},
        {"heads": Span(0, 1), "head_stride": 2**63},
        {"block_tokens": 1, "token_stride": 2**63, "head_stride": 0, "block_stride": 0},
        {"block_tokens": 2**63, "token_stride": 0},
        {"total_heads": 2**63},
        {"share": (0, 0, 1)},
        {"share": (2, 2, 1)},
        {"share": (2, -1, 1)},
        {"share": (2, 0, 0)},
        {"share": (2, 0, 5)},
        {"share": (2, 0, 32)},
        {"share": (2**62, 0, 1)},
        {"share": (2, 0, 1), "kind": "state", "token_stride": 0},
    ],
    ids=str,
)
def test_malformed_shard_is_refused(changes: dict[str, Any]) -> None:
    """Negative, zero, huge and inconsistent numbers, which a peer may send, raise ValueError."""
    with pytest.raises(ValueError, match="layers"):
        make_shard(**changes)


@given(st.lists(REGION_SHARDS, max_size=8))
def test_memory_regions_cover_exactly_the_shards(shards: list[LayerShard]) -> None:
    """Every byte of a shard is in a region, once, and no other byte is."""
    cells = _cells(memory_regions(shards))
    assert len(cells) == len(set(cells))
    assert set(cells) == set(_cells([(shard.memory, shard.device, shard.extent) for shard in shards]))


@given(st.lists(REGION_SHARDS, max_size=8))
def test_memory_regions_are_as_few_as_possible(shards: list[LayerShard]) -> None:
    """Regions of one memory and device neither touch nor overlap."""
    regions = memory_regions(shards)
    for (memory, device, extent), (other_memory, other_device, other) in itertools.pairwise(regions):
        assert (memory, device) != (other_memory, other_device) or extent.stop < other.start


def test_layers_of_one_buffer_are_one_region() -> None:
    """Layers stored one after the other, and layers interleaved block by block, are registered once."""
    size = make_shard().extent.size
    after_each_other = [make_shard(address=4096 + layer * size) for layer in range(5)]
    assert memory_regions(after_each_other) == [("DRAM", 0, Span(4096, 4096 + 5 * size))]
    interleaved = [make_shard(address=4096 + layer * 1024, block_stride=5 * 1024) for layer in range(5)]
    assert memory_regions(interleaved) == [("DRAM", 0, Span(4096, 4096 + 5 * size))]


def test_holders_lists_every_replica_of_a_layer() -> None:
    """A layer of stage 1 is held by that stage's ranks and by no other worker."""
    engine = make_engine(tp=3, stages=(2, 1), heads=2)
    holders = engine.holders()
    assert [index for index, _ in holders["model.layers.2.self_attn.attn"]] == [3, 4, 5]
    assert list(holders) == [f"model.layers.{layer}.self_attn.attn" for layer in range(3)]


def test_worker_name_tells_its_ranks() -> None:
    """Messages to people name a worker by stage and rank."""
    assert [worker.name for worker in make_engine(tp=2, stages=(1,)).workers] == ["pp0tp0", "pp0tp1"]


@given(st.integers(1, 4), st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 8), st.booleans())
def test_layout_survives_the_wire(tp: int, stages: list[int], heads: int, opaque: bool) -> None:
    """An engine's layout is equal after msgpack, spans and agent bytes included."""
    engine = make_engine(tp, stages, heads, opaque=opaque)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(engine), type=EngineLayout)
    assert decoded == engine
    assert isinstance(decoded.workers[0].shards[0].heads, Span)


SHARD_FIELDS = msgspec.to_builtins(make_shard())
SOMETHING = st.one_of(st.none(), st.booleans(), WIRE_INTEGERS, st.floats(), st.text(), st.lists(WIRE_INTEGERS))


@given(st.dictionaries(st.sampled_from(sorted(SHARD_FIELDS)), SOMETHING, min_size=1))
def test_junk_in_a_shard_is_a_validation_error(junk: dict[str, Any]) -> None:
    """A shard from the wire is either a well-formed one or a ``ValidationError``, never another exception."""
    message = msgspec.msgpack.encode({**SHARD_FIELDS, **junk})
    try:
        shard = msgspec.msgpack.decode(message, type=LayerShard)
    except msgspec.ValidationError:
        return
    assert 0 <= shard.extent.start < shard.extent.stop <= 2**62


@pytest.mark.parametrize(
    "junk",
    [
        {"heads": [0, 5]},
        {"heads": [0, 1, 2]},
        {"heads": "01"},
        {"kind": "state of mind"},
        {"address": 2**64 - 1},
        {"num_blocks": 0},
        {"layer": None},
        {"opaque": 1},
    ],
    ids=str,
)
def test_malformed_shard_from_the_wire_is_a_validation_error(junk: dict[str, Any]) -> None:
    """What the constructor refuses, the decoder refuses with its own exception, which the protocol catches."""
    message = msgspec.msgpack.encode({**SHARD_FIELDS, **junk})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(message, type=LayerShard)


@given(st.binary(max_size=200))
def test_random_bytes_are_no_layout(junk: bytes) -> None:
    """Bytes that are no layout raise msgspec's own errors."""
    with pytest.raises(msgspec.DecodeError):  # of which ValidationError is one
        msgspec.msgpack.decode(junk, type=EngineLayout)
