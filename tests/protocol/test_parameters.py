"""Broken, foreign and forged parameters: every one is a ParamsError, or a valid offer; nothing else comes of them."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import ParamsError
from kvferry.protocol.authentication import Seal
from kvferry.protocol.messages import PARAMS_KEY, PROTOCOL_VERSION, Claim, Offer, Transfer, encode, engine_identity

TOKEN = "0123456789abcdef" * 2
OFFER = Offer("10.0.0.7", 5601, "prefill-3", "cmpl-1", TOKEN, TOKEN[::-1], 1500, TOKEN, "tp2pp2dp0")
SEAL = Seal(b"a secret of enough bytes")
OPEN = Seal()

TOP = ("remote_host", "remote_port", "remote_engine_id", "remote_request_id", "remote_num_tokens", PARAMS_KEY)
OWN = ("version", "incarnation", "nonce", "token_hash", "layout", "mac")
MISSING = object()


def _nest(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


BROKEN = {
    "missing": MISSING,
    "null": None,
    "true": True,
    "negative": -1,
    "zero": 0,
    "fraction": 0.5,
    "not a number": float("nan"),
    "infinite": float("inf"),
    "beyond 64 bits": 1 << 70,
    "beyond any text": 10**5000,
    "empty": "",
    "huge": "a" * 1_000_000,
    "huge number in text": "9" * 1000,
    "lone surrogate": "\ud800",
    "line break": "10.0.0.7\nERROR all is lost",
    "final line break": TOKEN + "\n",
    "zero byte": "10.0.0.7\0",
    "list": [1, "2", None],
    "long list": [0] * 100_000,
    "object": {"a": {"b": 1}},
    "deep list": _nest(100_000),
    "deep object": {"a": _nest(100_000)},
}


def _change(params, key, value):
    place = params if key in TOP else params[PARAMS_KEY]
    if value is MISSING:
        del place[key]
    else:
        place[key] = value
    return params


def _offer_of(params, seal):
    """The offer, None for ParamsError; and what is done with an offer at once works."""
    try:
        offer = Offer.from_params(params, seal)
    except ParamsError as error:
        text = str(error)
        if len(text) > 1000 or "\n" in text:
            pytest.fail(f"unfit for a log: {text[:2000]!r}")
        return None
    assert offer == msgspec.convert(msgspec.to_builtins(offer), Offer)
    encode(Claim(offer.incarnation, offer.request, offer.nonce, TOKEN, TOKEN, ["pp0tp0"], 1500, TOKEN))
    assert "\n" not in offer.host
    return offer


# What an offer says for people only may be any text.
HARMLESS = {
    (key, name)
    for key, names in {
        "remote_engine_id": ("empty", "huge number in text", "line break", "final line break", "zero byte"),
        "remote_request_id": ("line break", "final line break", "zero byte"),
        "layout": ("empty",),  # is logged
        "mac": BROKEN,
    }.items()
    for name in names
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("key", [*TOP, *OWN])
def test_a_broken_value_in_any_place_is_refused(key, name):
    offer = _offer_of(_change(OFFER.to_params(OPEN), key, BROKEN[name]), OPEN)
    assert (offer is not None) == ((key, name) in HARMLESS)


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("key", [*TOP, *OWN])
def test_with_a_secret_nothing_that_was_signed_can_be_broken(key, name):
    offer = _offer_of(_change(OFFER.to_params(SEAL), key, BROKEN[name]), SEAL)
    assert offer is None


ALTERED = {
    "remote_host": "10.0.0.8",
    "remote_port": 5602,
    "remote_engine_id": "prefill-4",
    "remote_request_id": "cmpl-2",
    "remote_num_tokens": 1499,
    "incarnation": TOKEN[::-1],
    "nonce": TOKEN,
    "token_hash": TOKEN[::-1],
    "layout": "tp1pp1dp0",
}


def test_every_field_is_altered_by_one_of_the_tests():
    assert len(ALTERED) == len(msgspec.structs.fields(Offer))


@pytest.mark.parametrize("key", ALTERED)
def test_an_altered_value_is_refused_with_a_secret_and_only_then(key):
    for seal, accepted in ((SEAL, False), (OPEN, True)):
        offer = _offer_of(_change(OFFER.to_params(seal), key, ALTERED[key]), seal)
        assert (offer is not None) == accepted


@pytest.mark.parametrize("signer", [OPEN, Seal(b"another secret of enough bytes")], ids=["unsigned", "other secret"])
def test_parameters_without_this_secrets_signature_are_refused(signer):
    with pytest.raises(ParamsError, match="not signed with this engine's secret"):
        Offer.from_params(OFFER.to_params(signer), SEAL)


def test_signed_parameters_survive_a_router_that_writes_them_anew():
    params = json.loads(json.dumps(OFFER.to_params(SEAL), sort_keys=True, indent=3))
    assert Offer.from_params(params, SEAL) == OFFER


def test_a_side_without_a_secret_reads_what_a_side_with_one_signed():
    assert Offer.from_params(OFFER.to_params(SEAL), OPEN) == OFFER


@pytest.mark.parametrize("host", ["8.8.8.8", "prefill.example.com", "2001:4860::1"])
def test_a_host_that_is_not_private_is_refused_without_a_secret_and_says_what_to_set(host):
    offer = msgspec.structs.replace(OFFER, host=host)
    with pytest.raises(ParamsError, match=r"KVFERRY_SECRET or secret_file, or allow_public_peers"):
        Offer.from_params(offer.to_params(OPEN), OPEN)
    assert Offer.from_params(offer.to_params(SEAL), SEAL) == offer
    assert Offer.from_params(offer.to_params(OPEN), Seal(allow_public=True)) == offer


FOREIGN = {
    "nixl": {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": "p",
        "remote_request_id": "cmpl-1",
        "remote_host": "10.0.0.7",
        "remote_port": 5600,
        "tp_size": 2,
    },
    "mooncake": {"do_remote_prefill": True, "transfer_id": "xfer-1", "remote_bootstrap_addr": "http://10.0.0.7:8998"},
    "lmcache": {"ret_first_tok": True, "disagg_spec": {"req_id": "1", "receiver_host": "10.0.0.7"}},
    "nothing": {},
}


@pytest.mark.parametrize("params", FOREIGN.values(), ids=FOREIGN)
def test_another_connectors_parameters_are_told_apart(params):
    with pytest.raises(ParamsError, match="no KVFerry producer made them"):
        Offer.from_params(params, OPEN)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10) | st.just(TOKEN),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from([*TOP, "x"]), JSON), st.dictionaries(st.sampled_from([*OWN, "x"]), JSON))
def test_arbitrary_json_is_refused_or_a_valid_offer(top, own):
    params = {**OFFER.to_params(OPEN), **top}
    if isinstance(params.get(PARAMS_KEY), dict):
        params[PARAMS_KEY] = {"version": PROTOCOL_VERSION, **params[PARAMS_KEY], **own}
    _offer_of(params, OPEN)
    assert _offer_of(params, SEAL) is None


def test_an_offer_that_streams_names_no_tokens_and_survives_a_router():
    offer = msgspec.structs.replace(OFFER, tokens=None, token_hash=None)
    assert Offer.from_params(json.loads(json.dumps(offer.to_params(SEAL))), SEAL) == offer


@pytest.mark.parametrize("change", [{"tokens": None}, {"token_hash": None}])
def test_a_number_of_tokens_and_their_hash_go_together(change):
    with pytest.raises(ParamsError, match="without their hash"):
        Offer.from_params(msgspec.structs.replace(OFFER, **change).to_params(SEAL), SEAL)


TRANSFER = Transfer(TOKEN, TOKEN[::-1])


def test_what_a_prefill_is_told_of_a_transfer_survives_a_router():
    assert Transfer.from_params(json.loads(json.dumps(TRANSFER.to_params()))) == TRANSFER


def test_an_ordinary_prefill_is_no_transfer_that_streams():
    assert Transfer.from_params({"do_remote_decode": True}) is None


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("key", ["version", "name", "nonce"])
def test_a_broken_transfer_is_refused(key, name):
    params = _change(TRANSFER.to_params(), key, BROKEN[name])
    with pytest.raises(ParamsError):
        Transfer.from_params(params)


IDENTITY = {"remote_host": "10.0.0.7", "remote_port": 5601, "tp_size": 1, "remote_request_id": "anything"}


def _identity(seal):
    return {**IDENTITY, "remote_engine_id": engine_identity(("10.0.0.7", 5601), TOKEN, seal)}


def test_both_legs_of_a_request_find_each_other_by_the_id_that_their_router_gave_them():
    """vLLM adds random digits to it, others on each side; a prompt list or n > 1 adds a number, the same on both."""
    at_prefill = Transfer.of_request("cmpl-___prefill_addr_a___decode_addr_b_0123-0-89abcdef")
    offer = Offer.of_identity(_identity(SEAL), "cmpl-___prefill_addr_a___decode_addr_b_0123-0-76543210", SEAL)
    assert (offer.request, offer.nonce) == (at_prefill.name, at_prefill.nonce)
    assert (offer.address, offer.incarnation, offer.tokens) == (("10.0.0.7", 5601), TOKEN, None)
    other = Offer.of_identity(_identity(SEAL), "cmpl-___prefill_addr_a___decode_addr_b_0123-1-76543210", SEAL)
    assert other.request != offer.request


def test_an_engine_id_that_is_an_ordinary_label_is_no_identity():
    assert Offer.of_identity({**IDENTITY, "remote_engine_id": "prefill-3"}, "r", OPEN) is None
    assert Offer.of_identity({}, "r", OPEN) is None


@pytest.mark.parametrize("change", [{"remote_host": "10.0.0.8"}, {"remote_port": 5602}, {"remote_engine_id": "other"}])
def test_an_identity_that_was_altered_or_not_signed_is_refused(change):
    altered = {**_identity(SEAL), **change}
    if "remote_engine_id" in change:
        altered["remote_engine_id"] = engine_identity(("10.0.0.7", 5601), TOKEN, OPEN)
    with pytest.raises(ParamsError, match="not signed"):
        Offer.of_identity(altered, "r", SEAL)


@pytest.mark.parametrize("change", [{"remote_host": "8.8.8.8"}, {"remote_host": {"a": 1}}, {"remote_port": 0}])
def test_an_identity_with_an_address_that_may_not_be_spoken_to_is_refused(change):
    identity = {**IDENTITY, **change}
    host = identity["remote_host"] if isinstance(identity["remote_host"], str) else "10.0.0.7"
    identity["remote_engine_id"] = engine_identity((host, identity["remote_port"]), TOKEN, OPEN)
    with pytest.raises(ParamsError):
        Offer.of_identity(identity, "r", OPEN)
