"""Grants as the tests of them make them, and messages about those."""

from kvferry.protocol.messages import Ack, Claim, Release

LEASE = 30.0
INCARNATION, CONSUMER, STRANGER = "1" * 32, "2" * 32, "3" * 32
READERS = ["pp0tp0", "pp1tp0"]
BLOCKS = [[3, 1, 4], [1, 5]]
HASH = "a" * 32


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def claim_of(grant, claim="c" * 32, consumer=CONSUMER, readers=READERS, nonce=None, incarnation=INCARNATION):
    names = (incarnation, grant.name, nonce or grant.nonce, claim, consumer)
    return Claim(*names, readers, grant.tokens, grant.token_hash)


def ack_of(grant, reader, claim="c" * 32):
    return Ack(INCARNATION, grant.request, claim, reader)


def release_of(grant, claim="c" * 32, nonce=None):
    return Release(INCARNATION, grant.request, nonce or grant.nonce, claim)
