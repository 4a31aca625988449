from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import LayoutError
from kvferry.geometry import NULL_BLOCK, Descriptors, LayerShard, Piece, Span, descriptors

from .layouts import make_shard

Place = tuple[str, int, str, int]
ByteMap = dict[tuple[Place, int], int]
"""(place, local byte) -> remote byte."""

PLACE: Place = ("DRAM", 0, "DRAM", 0)


@dataclass(frozen=True)
class Request:
    """One call of ``descriptors``."""

    pieces: list[Piece]
    remote_blocks: list[list[int]]
    local_blocks: list[list[int]]
    tokens: Span

    def descriptors(self) -> dict[Place, Descriptors]:
        return descriptors(self.pieces, self.remote_blocks, self.local_blocks, self.tokens)


def _make_layers(
    names: Sequence[str], *, order: str, layers_outermost: bool, address: int, **shape: Any
) -> list[LayerShard]:
    """Layers of one KV cache group in one buffer: ``HND`` or ``NHD`` inside a block, block or layer outermost."""
    heads, cell, tokens = Span(*shape["heads"]).size, shape["cell_bytes"], shape["block_tokens"]
    strides = {"HND": (tokens * cell, cell), "NHD": (cell, heads * cell)}[order]
    slab = heads * tokens * cell
    block_stride, step = (slab, shape["num_blocks"] * slab) if layers_outermost else (len(names) * slab, slab)
    return [
        make_shard(
            layer=name,
            address=address + index * step,
            block_stride=block_stride,
            head_stride=strides[0],
            token_stride=strides[1],
            **shape,
        )
        for index, name in enumerate(names)
    ]


@st.composite
def _spans(draw: st.DrawFn, total: int) -> Span:
    start = draw(st.integers(0, total - 1))
    return Span(start, draw(st.integers(start + 1, total)))


@st.composite
def _block_lists(draw: st.DrawFn, shard: LayerShard, stop: int, holes: set[int]) -> list[int]:
    """Ids for the tokens before ``stop`` and perhaps more, in any order; null where a token of ``holes`` lies."""
    size = shard.manager_block_tokens
    ids = draw(st.permutations(range(1, shard.manager_blocks)))[: -(-stop // size) + draw(st.integers(0, 2))]
    return [NULL_BLOCK if any(at * size <= hole < (at + 1) * size for hole in holes) else i for at, i in enumerate(ids)]


@st.composite
def _requests(draw: st.DrawFn) -> Request:
    """Any number of KV cache groups with any storage on both sides, and any range of tokens of a request."""
    total_heads, opaque = draw(st.integers(1, 4)), draw(st.booleans())
    groups = draw(st.integers(1, 2))
    stop = draw(st.integers(0, 24))
    pieces: list[Piece] = []
    blocks: dict[str, dict[int, list[int]]] = {"local": {}, "remote": {}}
    sizes: list[int] = []
    for group in range(groups):
        names = [f"model.layers.{group}.{layer}" for layer in range(draw(st.integers(1, 3)))]
        cell, size = draw(st.integers(1, 3)), draw(st.integers(1, 6))
        split = draw(st.integers(1, 2))
        sizes.append(size)
        # A sliding window: the consumer holds no blocks before it, the producer may have dropped those too.
        window = draw(st.integers(0, stop))
        sides: dict[str, list[LayerShard]] = {}
        for side, its_group in (("local", group), ("remote", groups - 1 - group)):
            tokens = size if opaque else draw(st.integers(1, 6))
            its_split = split if opaque else draw(st.integers(1, 2))
            sides[side] = _make_layers(
                names,
                order="HND" if opaque else draw(st.sampled_from(["HND", "NHD"])),
                layers_outermost=draw(st.booleans()),
                address=draw(st.integers(1, 99)) + (group << 20),
                heads=draw(_spans(total_heads)),
                total_heads=total_heads,
                cell_bytes=cell,
                block_tokens=tokens,
                split=its_split,
                num_blocks=(stop // (tokens * its_split) + 5) * its_split,
                opaque=opaque,
                group=its_group,
                memory=draw(st.sampled_from(["DRAM", "VRAM"])),
                device=draw(st.integers(0, 1)),
            )
        local, remote = sides["local"][0], sides["remote"][0]
        mine = draw(_block_lists(local, stop, set(range(window))))
        gone = [at for at in range(stop) if mine[at // local.manager_block_tokens] == NULL_BLOCK]
        theirs = draw(_block_lists(remote, stop, set()))
        for at in range(len(theirs)):
            held = range(at * remote.manager_block_tokens, (at + 1) * remote.manager_block_tokens)
            if gone and held[-1] <= gone[-1] and draw(st.booleans()):
                theirs[at] = NULL_BLOCK
        blocks["local"][local.group], blocks["remote"][remote.group] = mine, theirs
        for here, there in zip(sides["local"], sides["remote"], strict=True):
            common = here.heads & there.heads
            if common:
                pieces.append(Piece(there, here, common))
    start = draw(st.integers(0, stop))
    if opaque:
        start -= start % int(np.lcm.reduce(sizes))
    return Request(
        draw(st.permutations(pieces)),
        [blocks["remote"][group] for group in range(groups)],
        [blocks["local"][group] for group in range(groups)],
        Span(start, stop),
    )


def _cell(shard: LayerShard, ids: list[int], head: int, token: int) -> int | None:
    """Address of a cell by the definition in ``LayerShard``, or None in a null block."""
    block = ids[token // shard.manager_block_tokens]
    kernel_block = block * shard.split + token % shard.manager_block_tokens // shard.block_tokens
    offset = kernel_block * shard.block_stride + (head - shard.heads.start) * shard.head_stride
    return None if block == NULL_BLOCK else shard.address + offset + token % shard.block_tokens * shard.token_stride


def _naive(request: Request) -> ByteMap:
    """Layer by layer, head by head, token by token, byte by byte."""
    moved: ByteMap = {}
    for piece in request.pieces:
        local, remote = piece.local, piece.remote
        start, stop = request.tokens
        if local.opaque:
            stop = -(-stop // local.block_tokens) * local.block_tokens if start < stop else stop
        for head in range(*piece.heads):
            for token in range(start, stop):
                to = _cell(local, request.local_blocks[local.group], head, token)
                if to is None:
                    continue
                source = _cell(remote, request.remote_blocks[remote.group], head, token)
                assert source is not None, "the strategy made a request that cannot be served"
                for byte in range(local.cell_bytes):
                    moved[(local.memory, local.device, remote.memory, remote.device), to + byte] = source + byte
    return moved


def _byte_map(ranges: dict[Place, Descriptors]) -> ByteMap:
    moved: ByteMap = {}
    for place, part in ranges.items():
        for local, remote, size in zip(part.local.tolist(), part.remote.tolist(), part.sizes.tolist(), strict=True):
            for byte in range(size):
                assert (place, local + byte) not in moved, "a byte is written twice"
                moved[place, local + byte] = remote + byte
    return moved


def _assert_maximal(ranges: dict[Place, Descriptors]) -> None:
    """No range is continued by another one on both sides."""
    for part in ranges.values():
        starts = set(zip(part.local.tolist(), part.remote.tolist(), strict=True))
        stops = zip((part.local + part.sizes).tolist(), (part.remote + part.sizes).tolist(), strict=True)
        assert not starts & set(stops)
        assert (part.sizes > 0).all()


def _one_piece(local: LayerShard, remote: LayerShard) -> list[Piece]:
    return [Piece(remote, local, local.heads & remote.heads)]


@given(_requests())
def test_moves_the_same_bytes_as_the_definition(request_: Request) -> None:
    """The vectorised ranges, merged, are byte for byte the map that a loop over every cell gives."""
    assert _byte_map(request_.descriptors()) == _naive(request_)


@given(_requests())
def test_ranges_are_merged_as_far_as_possible(request_: Request) -> None:
    """Ranges that continue each other on both sides are one, across heads, blocks and layers."""
    _assert_maximal(request_.descriptors())


@given(_requests(), st.data())
def test_token_ranges_add_up(request_: Request, data: st.DataObject) -> None:
    """Reading a request in two parts moves the same bytes as reading it at once."""
    unit = int(
        np.lcm.reduce([piece.local.block_tokens if piece.local.opaque else 1 for piece in request_.pieces] or [1])
    )
    cut = data.draw(st.integers(request_.tokens.start, request_.tokens.stop))
    cut = max(request_.tokens.start, cut - cut % unit)
    parts = [
        Request(request_.pieces, request_.remote_blocks, request_.local_blocks, tokens).descriptors()
        for tokens in (Span(request_.tokens.start, cut), Span(cut, request_.tokens.stop))
    ]
    assert _byte_map(parts[0]) | _byte_map(parts[1]) == _byte_map(request_.descriptors())


@given(_requests())
def test_totals_count_what_moves(request_: Request) -> None:
    """``len`` and ``bytes`` are the number of ranges and the bytes of all of them."""
    for part in request_.descriptors().values():
        assert len(part) == len(part.local) == len(part.remote)
        assert part.bytes == sum(part.sizes.tolist())


def test_consecutive_blocks_of_equal_layouts_are_one_range_per_layer() -> None:
    """The common case, equal layouts and consecutive ids, costs one range per layer."""
    local, remote = make_shard(address=0), make_shard(address=1 << 20)
    ranges = descriptors(_one_piece(local, remote), [[3, 4, 5]], [[1, 2, 3]], Span(0, 48))[PLACE]
    assert (ranges.local.tolist(), ranges.remote.tolist(), ranges.sizes.tolist()) == (
        [1024],
        [(1 << 20) + 3 * 1024],
        [3 * 1024],
    )


def test_layers_stored_side_by_side_merge() -> None:
    """With all layers of a block next to each other on both sides, a block is one range for all of them."""
    names = [f"model.layers.{layer}" for layer in range(4)]
    shape: dict[str, Any] = {"heads": Span(0, 2), "cell_bytes": 32, "block_tokens": 16, "num_blocks": 8}
    local = _make_layers(names, order="HND", layers_outermost=False, address=0, **shape)
    remote = _make_layers(names, order="HND", layers_outermost=False, address=1 << 20, **shape)
    pieces = [piece for one, other in zip(local, remote, strict=True) for piece in _one_piece(one, other)]
    assert descriptors(pieces, [[3, 5]], [[1, 7]], Span(0, 32))[PLACE].sizes.tolist() == [4 * 1024] * 2


def test_nothing_to_move_is_no_range() -> None:
    """An empty token range, no pieces, and blocks that are all null, move nothing."""
    pieces = _one_piece(make_shard(), make_shard())
    assert descriptors([], [], [], Span(0, 16)) == {}
    assert len(descriptors(pieces, [[1]], [[1]], Span(16, 16))[PLACE]) == 0
    assert len(descriptors(pieces, [[1]], [[1]], Span(9, 3))[PLACE]) == 0
    assert len(descriptors(pieces, [[0]], [[NULL_BLOCK]], Span(0, 16))[PLACE]) == 0


def test_last_opaque_block_moves_whole() -> None:
    """Tokens of an opaque slab cannot be told apart, so one token costs its block."""
    pieces = _one_piece(make_shard(opaque=True), make_shard(opaque=True))
    assert descriptors(pieces, [[1, 2]], [[1, 2]], Span(0, 17))[PLACE].bytes == 2 * 1024


def _assert_refused(match: str, remote: list[list[int]], local: list[list[int]], tokens: Span, **changes: Any) -> None:
    pieces = _one_piece(make_shard(**changes), make_shard(**changes))
    with pytest.raises(LayoutError, match=match):
        descriptors(pieces, remote, local, tokens)


@pytest.mark.parametrize("side", ["local", "remote"])
def test_a_short_block_list_is_refused(side: str) -> None:
    """A list that ends before the last token is an error that says which side and which token."""
    lists = {"local": [[1, 2]], "remote": [[1, 2]], side: [[1]]}
    _assert_refused(f"1 {side} blocks do not hold token 16", lists["remote"], lists["local"], Span(0, 17))


@pytest.mark.parametrize("side", ["local", "remote"])
@pytest.mark.parametrize("block", [-1, 8, 2**40, 2**63, 2**64 - 1])
def test_a_block_outside_the_cache_is_refused(side: str, block: int) -> None:
    """An id below zero or past the cache would read or write foreign memory."""
    lists = {"local": [[1]], "remote": [[1]], side: [[block]]}
    _assert_refused("outside", lists["remote"], lists["local"], Span(0, 16))


@pytest.mark.parametrize("side", ["local", "remote"])
def test_ids_are_bounded_by_the_cache_managers_count(side: str) -> None:
    """With 2 kernel blocks per block, 8 kernel blocks are ids 0 to 3."""
    lists = {"local": [[3]], "remote": [[3]], side: [[4]]}
    _assert_refused(
        f"{side} block ids reach outside the cache of 4", lists["remote"], lists["local"], Span(0, 8), split=2
    )


def test_a_block_that_only_the_producer_lacks_is_refused() -> None:
    """Where the consumer needs a block that slid out of the producer's window, there is nothing right to read."""
    _assert_refused("no longer holds", [[0, 2]], [[1, 2]], Span(0, 32))


def test_a_missing_group_is_refused() -> None:
    """A layer of a KV cache group for which no block list came is an error."""
    _assert_refused("group 1", [[1]], [[1]], Span(0, 16), group=1)


def test_a_start_inside_an_opaque_block_is_refused() -> None:
    """Opaque blocks move whole, so a read must not begin in the middle of one."""
    _assert_refused("inside an opaque block", [[1]], [[1]], Span(8, 16), opaque=True)


def test_a_start_before_the_request_is_refused() -> None:
    """A negative position must not wrap around to the last block."""
    _assert_refused("start before", [[1, 2]], [[1, 2]], Span(-4, 16))
    _assert_refused("start before", [[1, 2]], [[1, 2]], Span(-16, 16), opaque=True)


def test_opaque_blocks_of_unequal_size_are_refused() -> None:
    """The check refuses such a pair; should it get here all the same, nothing moves."""
    one, other = make_shard(opaque=True), make_shard(opaque=True, block_tokens=8)
    with pytest.raises(LayoutError, match="16 and 8 tokens"):
        descriptors(_one_piece(one, other), [[1]], [[1]], Span(0, 8))


WIRE = st.one_of(st.integers(0, 40), st.integers(0, 2**64 - 1), st.sampled_from([2**31, 2**61, 2**62, 2**63 - 1]))


@given(
    st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(
            ["block_tokens", "num_blocks", "split", "address", "block_stride", "head_stride", "token_stride", "group"],
            WIRE,
        ),
    ),
    st.lists(st.lists(WIRE, max_size=4), max_size=3),
    st.booleans(),
)
def test_nothing_a_peer_sends_raises_anything_but_a_layout_error(
    changes: dict[str, int], blocks: list[list[int]], opaque: bool
) -> None:
    """Any numbers in the remote shard and any block ids give ranges inside the remote shard, or LayoutError."""
    try:
        remote = make_shard(opaque=opaque, **changes)
    except ValueError:
        return
    pieces = _one_piece(make_shard(opaque=opaque), remote)
    try:
        ranges = descriptors(pieces, blocks, [[1, 2]], Span(0, 32))[PLACE]
    except LayoutError:
        return
    inside = (ranges.remote >= remote.extent.start) & (ranges.remote + ranges.sizes <= remote.extent.stop)
    assert inside.all()
