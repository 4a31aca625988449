"""Who may be believed: peers that know the same secret, or, without a secret, peers on a private network."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from enum import Enum

from kvferry.errors import SettingsError

SECRET_VARIABLE = "KVFERRY_SECRET"
SHORTEST_SECRET = 16
"""Bytes. Whoever sees one message can try secrets as fast as a machine computes."""

PRIVATE_NETWORKS = tuple(
    ipaddress.ip_network(network)
    for network in (
        *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16"),
        *("::1/128", "fc00::/7", "fe80::/10"),
    )
)
"""Loopback, RFC 1918, link-local and unique local addresses: the Internet does not route them."""


class Purpose(Enum):
    """What a MAC is over, so that one kind of text never passes for another."""

    PARAMETERS = b"parameters"
    IDENTITY = b"identity"
    REQUEST = b"request"
    REPLY = b"reply"


class Seal:
    """Signs what this side sends and checks what it gets; one object for all of it.

    Without a secret it signs with nothing, accepts everything, and admits only private addresses instead.

    Args:
        secret: shared by all instances; None for none.
        allow_public: without a secret, admit any address.
    """

    __slots__ = ("_allow_public", "_key")

    def __init__(self, secret: bytes | None = None, allow_public: bool = False) -> None:
        # The key is as long as the digest, whatever the secret is, and of no use for anything else.
        self._key = None if secret is None else hmac.digest(secret, b"kvferry key 1", "sha256")
        self._allow_public = allow_public

    def __repr__(self) -> str:
        return f"Seal({'with' if self.has_secret else 'without'} a secret)"

    @property
    def has_secret(self) -> bool:
        return self._key is not None

    def sign(self, purpose: Purpose, *parts: bytes) -> bytes:
        """HMAC-SHA256 over the parts and their lengths, 32 bytes; no bytes without a secret."""
        if self._key is None:
            return b""
        mac = hmac.new(self._key, digestmod=hashlib.sha256)
        for part in (purpose.value, *parts):
            mac.update(len(part).to_bytes(8, "big"))
            mac.update(part)
        return mac.digest()

    def accepts(self, mac: bytes, purpose: Purpose, *parts: bytes) -> bool:
        """Whether someone with the same secret signed this, compared in constant time."""
        return self._key is None or hmac.compare_digest(mac, self.sign(purpose, *parts))

    def admits(self, host: str) -> bool:
        """Whether to talk to ``host`` at all: with a secret the MACs decide that, without one its address does."""
        return self.has_secret or self._allow_public or is_private(host)


def is_private(host: str) -> bool:
    """Whether ``host`` is an address of a private network, or ``localhost``. Any other name may mean any address."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return any(address in network for network in PRIVATE_NETWORKS)


def seal_with(secret: bytes, source: str) -> Seal:
    """Signs with a secret as it was read; white space at its end does not count. `source` names where it is from.

    Raises:
        SettingsError: it is shorter than ``SHORTEST_SECRET``.
    """
    secret = secret.rstrip()
    if len(secret) < SHORTEST_SECRET:
        raise SettingsError(
            f"{source} holds a secret of {len(secret)} bytes; at least {SHORTEST_SECRET} are needed, for example from "
            "`openssl rand -hex 32`"
        )
    return Seal(secret)
