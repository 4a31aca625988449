"""Messages and parameters: what is accepted, and that everything else is refused without harm."""

import json
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import MessageError, ParamsError
from kvferry.geometry import EngineLayout, Fingerprint, LayerShard, Span, WorkerShards
from kvferry.protocol.authentication import Seal
from kvferry.protocol.messages import (
    MAX_REQUEST_BYTES,
    PARAMS_KEY,
    PROTOCOL_VERSION,
    Ack,
    Claim,
    Follow,
    Gone,
    Granted,
    Held,
    Hello,
    Offer,
    Release,
    Released,
    Renew,
    Renewed,
    Waiting,
    Welcome,
    decode_reply,
    decode_request,
    encode,
)

SEAL = Seal(b"a secret of enough bytes")
TOKEN = "0123456789abcdef" * 2
OTHER = "fedcba9876543210" * 2

OFFER = Offer(
    host="10.0.0.7",
    port=5601,
    engine_id="prefill-3",
    request="cmpl-1",
    incarnation=TOKEN,
    nonce=OTHER,
    tokens=1500,
    token_hash=TOKEN,
    layout="tp2pp2dp0",
)

REQUESTS = [
    Hello(TOKEN),
    Claim(TOKEN, "cmpl-1", OTHER, TOKEN, OTHER, ["pp0tp0", "pp1tp0"], 1500, TOKEN, ahead=True),
    Follow(TOKEN, "cmpl-1", OTHER, "pp0tp0", life=1, ready=512),
    Renew(TOKEN, [("cmpl-1", OTHER), ("cmpl-2", TOKEN)]),
    Ack(TOKEN, "cmpl-1", OTHER, "pp0tp0"),
    Release(TOKEN, "cmpl-1", OTHER, TOKEN),
]


def _make_layout() -> EngineLayout:
    shard = LayerShard(
        layer="model.layers.0.self_attn.attn",
        kind="attention",
        heads=Span(0, 2),
        total_heads=4,
        block_tokens=16,
        num_blocks=10,
        cell_bytes=128,
        dtype="float32",
        packing="CPU_ATTN/vec",
        opaque=True,
        group=0,
        address=4096,
        block_stride=4096,
        head_stride=2048,
        token_stride=128,
    )
    worker = WorkerShards(0, 1, (shard,), b"agent")
    return EngineLayout(TOKEN, 2, 1, 0, Fingerprint("m", 1, "0.32"), (worker,))


REPLIES = [
    Welcome(_make_layout()),
    Granted([[3, 4], []], 40, 30.0, ready=39, life=1),
    Waiting(known=True),
    Held(),
    Renewed([TOKEN]),
    Released(),
    Gone("why"),
]


@pytest.mark.parametrize("message", REQUESTS, ids=lambda message: type(message).__name__)
def test_a_request_survives_the_wire(message):
    assert decode_request(encode(message)) == message


@pytest.mark.parametrize("message", REPLIES, ids=lambda message: type(message).__name__)
def test_a_reply_survives_the_wire(message):
    assert decode_reply(encode(message)) == message


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_as_a_message_error(data):
    for decode in (decode_request, decode_reply):
        with pytest.raises(MessageError):
            decode(data)


@given(st.sampled_from(REQUESTS), st.data())
def test_a_truncated_or_altered_request_is_refused_or_still_well_formed(message, data):
    body = bytearray(encode(message))
    at = data.draw(st.integers(0, len(body) - 1))
    body[at] = data.draw(st.integers(0, 255))
    cut = bytes(body[: data.draw(st.integers(0, len(body)))])
    try:
        decoded = decode_request(cut)
    except MessageError:
        return
    assert type(decoded) in {type(request) for request in REQUESTS}


def test_an_oversized_request_is_refused_before_it_is_decoded():
    with pytest.raises(MessageError, match="over the limit"):
        decode_request(bytes(MAX_REQUEST_BYTES + 1))


def test_a_layout_that_no_cache_can_have_is_refused_when_it_arrives():
    raw = msgspec.msgpack.decode(encode(Welcome(_make_layout())))
    raw["layout"]["workers"][0]["shards"][0]["heads"] = [3, 9]
    with pytest.raises(MessageError, match="heads"):
        decode_reply(msgspec.msgpack.encode(raw))


SHARD_FIELDS = list(msgspec.msgpack.decode(encode(_make_layout()))["workers"][0]["shards"][0])
ABSURD = [
    None,
    True,
    -1,
    0,
    1 << 62,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
    0.5,
    float("nan"),
    "",
    "9",
    [],
    [0, 1 << 63],
]


@pytest.mark.parametrize("value", ABSURD, ids=repr)
@pytest.mark.parametrize("field", SHARD_FIELDS)
def test_a_shard_with_an_absurd_value_anywhere_is_refused_or_a_possible_cache(field, value):
    raw = msgspec.msgpack.decode(encode(Welcome(_make_layout())))
    raw["layout"]["workers"][0]["shards"][0][field] = value
    try:
        (shard,) = decode_reply(msgspec.msgpack.encode(raw)).layout.workers[0].shards
    except MessageError:
        return
    assert 0 <= shard.extent.start < shard.extent.stop <= 1 << 62


@pytest.mark.parametrize("value", [*ABSURD, [None], [[]], [{}], [{"pp_rank": 0}]], ids=repr)
@pytest.mark.parametrize("field", ["incarnation", "tp", "pp", "dp_rank", "fingerprint", "workers"])
def test_a_layout_with_an_absurd_value_anywhere_is_refused_or_still_one(field, value):
    raw = msgspec.msgpack.decode(encode(Welcome(_make_layout())))
    raw["layout"][field] = value
    try:
        layout = decode_reply(msgspec.msgpack.encode(raw)).layout
    except MessageError:
        return
    assert decode_reply(encode(Welcome(layout))).layout == layout


def test_a_layout_of_many_layers_and_workers_arrives_whole():
    layout = _make_layout()
    shards = layout.workers[0].shards * 2000
    many = msgspec.structs.replace(Welcome(layout), layout=replace(layout, workers=(WorkerShards(0, 0, shards),) * 8))
    assert decode_reply(encode(many)) == many


@pytest.mark.parametrize("blocks", [[[-1]], [[1 << 31]], [[1 << 63]], [["1"]], [[None]], [1], None, {}], ids=repr)
def test_blocks_that_no_cache_has_are_refused_when_they_arrive(blocks):
    raw = {"type": "Granted", "blocks": blocks, "tokens": 40, "ttl": 30.0}
    with pytest.raises(MessageError, match="blocks"):
        decode_reply(msgspec.msgpack.encode(raw))


@pytest.mark.parametrize("ttl", [0.0, -1.0, 1e-300, float("nan"), float("inf")])
def test_a_lease_that_would_be_renewed_without_pause_or_never_is_refused(ttl):
    with pytest.raises(MessageError, match="ttl"):
        decode_reply(encode(Granted([[1]], 40, ttl, 40)))


def test_deep_nesting_is_refused():
    with pytest.raises(MessageError):
        decode_request(b"\x91" * 100_000)


def test_an_offer_survives_the_router_as_json():
    params = json.loads(json.dumps(OFFER.to_params(SEAL)))
    assert Offer.from_params(params, SEAL) == OFFER


def test_an_offer_is_small_and_names_no_blocks():
    params = OFFER.to_params(SEAL)
    assert params["remote_block_ids"] is None
    assert len(json.dumps(params)) < 600


def test_an_offer_never_asks_the_router_for_push_mode():
    """vllm-router dispatches both legs at once when it sees transfer_mode push."""
    assert OFFER.to_params(SEAL)["transfer_mode"] == "pull"


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=20),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
)
_TOP = ["remote_host", "remote_port", "remote_engine_id", "remote_request_id", "remote_num_tokens", PARAMS_KEY]
_OWN = ["version", "incarnation", "nonce", "token_hash", "layout"]


@given(st.sampled_from(_TOP), st.sampled_from(_OWN), st.booleans(), ANYTHING)
def test_parameters_with_any_value_in_any_place_are_refused_or_well_formed(top, own, inside, value):
    params = OFFER.to_params(SEAL)
    if inside:
        params[PARAMS_KEY][own] = value
    else:
        params[top] = value
    try:
        offer = Offer.from_params(params, SEAL)
    except ParamsError:
        return
    assert isinstance(offer.host, str)
    assert 1 <= offer.port <= 65535
    assert offer.tokens >= 1


@pytest.mark.parametrize("key", _TOP)
def test_parameters_without_one_of_the_keys_are_refused(key):
    params = OFFER.to_params(SEAL)
    del params[key]
    with pytest.raises(ParamsError):
        Offer.from_params(params, SEAL)


def test_parameters_of_another_connector_are_told_apart():
    params = {"do_remote_prefill": True, "remote_engine_id": "x", "remote_block_ids": [[1, 2]], "remote_port": 5600}
    with pytest.raises(ParamsError, match="no KVFerry producer made them"):
        Offer.from_params(params, SEAL)


def test_parameters_of_another_protocol_version_name_both_versions():
    params = OFFER.to_params(SEAL)
    params[PARAMS_KEY]["version"] = 7
    with pytest.raises(ParamsError, match=f"version is 7, this is {PROTOCOL_VERSION}"):
        Offer.from_params(params, SEAL)
