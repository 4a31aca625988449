"""Seals: what is signed, what is refused, and which addresses are private."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.authentication import Purpose, Seal, is_private

SECRET = b"sixteen bytes or more"
SEAL = Seal(SECRET)


@given(st.lists(st.binary(max_size=50), max_size=4), st.sampled_from(Purpose))
def test_what_was_signed_is_accepted_by_who_knows_the_secret(parts, purpose):
    assert Seal(SECRET).accepts(SEAL.sign(purpose, *parts), purpose, *parts)
    assert not Seal(SECRET + b"!").accepts(SEAL.sign(purpose, *parts), purpose, *parts)


def test_a_signature_serves_one_purpose():
    mac = SEAL.sign(Purpose.REQUEST, b"body")
    assert not SEAL.accepts(mac, Purpose.REPLY, b"body")
    assert not SEAL.accepts(mac, Purpose.PARAMETERS, b"body")


def test_parts_cannot_be_cut_elsewhere():
    assert not SEAL.accepts(SEAL.sign(Purpose.REQUEST, b"ab", b"c"), Purpose.REQUEST, b"a", b"bc")


@pytest.mark.parametrize("mac", [b"", bytes(32), b"x" * 31, b"x" * 1000], ids=len)
def test_no_signature_is_none(mac):
    assert not SEAL.accepts(mac, Purpose.REQUEST, b"body")


def test_without_a_secret_everything_is_accepted_and_nothing_signed():
    assert Seal().sign(Purpose.REQUEST, b"body") == b""
    assert Seal().accepts(b"", Purpose.REQUEST, b"body")
    assert Seal().accepts(b"whatever", Purpose.REQUEST, b"body")


def test_a_secret_is_in_no_text_of_its_seal():
    assert repr(SEAL) == "Seal(with a secret)"
    assert not hasattr(SEAL, "__dict__")


PRIVATE = (
    *("127.0.0.1", "127.8.9.10", "10.0.0.7", "172.16.0.1", "172.31.255.255", "192.168.1.1", "169.254.3.4"),
    *("::1", "fd00::1", "fe80::1", "fe80::1%eth0", "::ffff:10.1.2.3", "localhost"),
)
PUBLIC = (
    *("8.8.8.8", "172.32.0.1", "172.15.255.255", "192.169.0.1", "11.0.0.1", "0.0.0.0", "::", "2001:4860::1"),
    *("::ffff:8.8.8.8", "prefill-0.prefill.svc", "localhost.evil.example", "10.0.0.7.evil.example", "", "0x7f000001"),
)


@pytest.mark.parametrize("host", PRIVATE)
def test_private_addresses_are_admitted_without_a_secret(host):
    assert is_private(host)
    assert Seal().admits(host)


@pytest.mark.parametrize("host", PUBLIC)
def test_other_addresses_and_all_names_need_a_secret_or_a_word(host):
    assert not Seal().admits(host)
    assert Seal(allow_public=True).admits(host)
    assert SEAL.admits(host)
