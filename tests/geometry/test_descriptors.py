from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import LayoutError
from kvferry.geometry import NULL_BLOCK, Descriptors, LayerShard, Piece, Span, TokenShare, descriptors

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
def _shares(draw: st.DrawFn, block: int, step: int = 1) -> TokenShare:
    """A context parallel rank of any number; what it holds at a time divides its block and is a multiple of ``step``"""
    size = draw(st.integers(1, 3))
    interleave = draw(st.sampled_from([at for at in range(step, block + 1, step) if block % at == 0]))
    return TokenShare(size, draw(st.integers(0, size - 1)), interleave)


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
        # Tokens of a slab are the same on both sides if they are shared out alike, or if they are a run anyway.
        shared = draw(_shares(size * split)) if draw(st.booleans()) else None
        # A sliding window: the consumer holds no blocks before it, the producer may have dropped those too.
        window = draw(st.integers(0, stop))
        sides: dict[str, list[LayerShard]] = {}
        for side, its_group in (("local", group), ("remote", groups - 1 - group)):
            tokens = size if opaque else draw(st.integers(1, 6))
            its_split = split if opaque else draw(st.integers(1, 2))
            share = (
                draw(_shares(tokens * its_split, tokens if opaque else 1)) if shared is None or not opaque else shared
            )
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
                share=share,
                opaque=opaque,
                group=its_group,
                memory=draw(st.sampled_from(["DRAM", "VRAM"])),
                device=draw(st.integers(0, 1)),
            )
        local, remote = sides["local"][0], sides["remote"][0]
        sizes += [local.manager_block_tokens, remote.manager_block_tokens]
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


def _place(shard: LayerShard, token: int) -> tuple[int, int] | None:
    """Position in the block list, and in the worker's block, by vLLM's formula; None of another rank's token."""
    size, rank, interleave = shard.share
    position, offset = divmod(token, shard.block_tokens * shard.split * size)
    if offset // interleave % size != rank:
        return None
    return position, offset // (size * interleave) * interleave + offset % interleave


def _cell(shard: LayerShard, ids: list[int], head: int, place: tuple[int, int]) -> int | None:
    """Address of a cell by the definition in ``LayerShard``, or None in a null block."""
    block, at = ids[place[0]], place[1]
    kernel_block = block * shard.split + at // shard.block_tokens
    offset = kernel_block * shard.block_stride + (head - shard.heads.start) * shard.head_stride
    return None if block == NULL_BLOCK else shard.address + offset + at % shard.block_tokens * shard.token_stride


def _moving(shard: LayerShard, tokens: Span) -> list[int]:
    """What of ``tokens`` the worker holds; in opaque slabs, all that is in a slab with one of them."""
    if not tokens:
        return []
    held = {token: place for token in range(tokens.stop + 200) if (place := _place(shard, token)) is not None}
    if not shard.opaque:
        return [token for token in range(*tokens) if token in held]
    slabs = {token: (at, offset // shard.block_tokens) for token, (at, offset) in held.items()}
    wanted = {slabs[token] for token in range(*tokens) if token in slabs}
    return [token for token, slab in slabs.items() if slab in wanted]


def _naive(request: Request) -> ByteMap:
    """Layer by layer, head by head, token by token, byte by byte."""
    moved: ByteMap = {}
    for piece in request.pieces:
        local, remote = piece.local, piece.remote
        for head in range(*piece.heads):
            for token in _moving(local, request.tokens):
                here, there = _place(local, token), _place(remote, token)
                assert here is not None
                to = _cell(local, request.local_blocks[local.group], head, here)
                if to is None or there is None:
                    continue
                source = _cell(remote, request.remote_blocks[remote.group], head, there)
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
    sizes = [shard.manager_block_tokens for piece in request_.pieces for shard in (piece.local, piece.remote)]
    unit = int(np.lcm.reduce(sizes)) if any(piece.local.opaque for piece in request_.pieces) else 1
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


def _shared(share: tuple[int, int, int], **changes: Any) -> LayerShard:
    return make_shard(heads=Span(0, 1), total_heads=1, share=share, **changes)


def test_ranks_that_share_tokens_alike_move_as_many_ranges_as_without() -> None:
    """Their tokens lie apart in the prompt and next to each other in the cache: consecutive blocks are one range."""
    pieces = _one_piece(_shared((4, 1, 1)), _shared((4, 1, 1), address=1 << 20))
    ranges = descriptors(pieces, [[3, 4, 5]], [[1, 2, 3]], Span(0, 3 * 64))[PLACE]
    assert ranges.sizes.tolist() == [3 * 16 * 32]


@pytest.mark.parametrize(("interleave", "ranges"), [(1, 64), (4, 16), (16, 4)])
def test_unequal_shares_move_in_ranges_of_an_interleave(interleave: int, ranges: int) -> None:
    """So an interleave as long as a block costs one range for each."""
    pieces = _one_piece(_shared((1, 0, 1), num_blocks=12), _shared((2, 1, interleave), address=1 << 20))
    found = descriptors(pieces, [[3, 5, 7, 6]], [[*range(1, 9)]], Span(0, 128))[PLACE]
    assert (len(found), found.bytes) == (ranges, 64 * 32)


def test_a_prompt_too_short_for_a_rank_is_no_range() -> None:
    """Of 16 tokens, 16 at a time, the second rank has none, and needs no block for it."""
    pieces = _one_piece(_shared((1, 0, 1)), _shared((2, 1, 16)))
    assert len(descriptors(pieces, [[1]], [[1]], Span(0, 16))[PLACE]) == 0


@pytest.mark.parametrize("shares", [((2, 1, 1), (1, 0, 1)), ((1, 0, 1), (2, 1, 1)), ((2, 1, 4), (2, 1, 8))], ids=str)
def test_opaque_blocks_of_other_tokens_are_refused(shares: tuple[tuple[int, int, int], tuple[int, int, int]]) -> None:
    """The check refuses such a pair; should it get here all the same, nothing moves."""
    local, remote = (_shared(share, opaque=True) for share in shares)
    with pytest.raises(LayoutError, match="opaque blocks hold"):
        descriptors(_one_piece(local, remote), [[1, 2]], [[1, 2]], Span(0, 32))


@pytest.mark.parametrize("remote", [((1, 0, 1), 32), ((2, 1, 16), 16), ((2, 1, 8), 16)], ids=str)
def test_blocks_that_are_loaded_to_their_end_are_so_on_every_rank(remote: tuple[tuple[int, int, int], int]) -> None:
    """A prompt that ends before a rank's part of the last block: what the producer has there is loaded all the same."""
    share, size = remote
    local, there = _shared((2, 1, 16), whole=True), _shared(share, whole=True, block_tokens=size)
    common = 16 if share != (2, 1, 8) else 8
    assert descriptors(_one_piece(local, there), [[1]], [[1]], Span(0, 3))[PLACE].bytes == common * 32
    with pytest.raises(LayoutError, match="blocks of 16 tokens do not fill one of 32"):
        descriptors(_one_piece(local, _shared((1, 0, 1), whole=True)), [[1]], [[1]], Span(0, 3))


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
    st.one_of(st.just((1, 0, 1)), st.tuples(WIRE, WIRE, WIRE), st.tuples(*[st.integers(0, 8)] * 3)),
)
def test_nothing_a_peer_sends_raises_anything_but_a_layout_error(
    changes: dict[str, int], blocks: list[list[int]], opaque: bool, share: tuple[int, int, int]
) -> None:
    """Any numbers in the remote shard and any block ids give ranges inside the remote shard, or LayoutError."""
    try:
        remote = make_shard(opaque=opaque, share=share, **changes)
    except ValueError:
        return
    pieces = _one_piece(make_shard(opaque=opaque), remote)
    try:
        ranges = descriptors(pieces, blocks, [[1, 2]], Span(0, 32))[PLACE]
    except LayoutError:
        return
    inside = (ranges.remote >= remote.extent.start) & (ranges.remote + ranges.sizes <= remote.extent.stop)
    assert inside.all()
