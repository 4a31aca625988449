"""Run as a process: a producer's engine core without an engine, that is a listener and its grants."""

import threading
import time

import msgspec

from kvferry.bench.transfer.remote import Role, run
from kvferry.errors import TransferError
from kvferry.geometry import EngineLayout
from kvferry.protocol.authentication import Seal
from kvferry.protocol.grants import Grants
from kvferry.protocol.identity import draw
from kvferry.protocol.messages import Address, Claim, Granted, Hello, Request, Welcome, encode
from kvferry.sidechannel.server import Listener, Respond

HOST = "127.0.0.1"
LEASE_S = 3600.0


class Identity(msgspec.Struct, frozen=True):
    """Where a core listens, and as whom."""

    address: Address
    incarnation: str


class Held(msgspec.Struct, frozen=True):
    """A request that was computed and claimed."""

    request: str
    claim: str
    grant: Granted


class Core(Role):
    """Signs with ``secret``, if that is not empty."""

    def __init__(self, secret: str) -> None:
        self._grants = Grants(draw(), LEASE_S, time.monotonic)
        self._lock = threading.Lock()
        self._welcome = b""
        seal = Seal(secret.encode() if secret else None)
        self._listener = Listener(HOST, 0, self._answer, lambda: None, seal)

    def identity(self) -> Identity:
        return Identity((HOST, self._listener.port), self._grants.incarnation)

    def describe(self, layout: EngineLayout) -> None:
        """What is answered to ``Hello`` from now on."""
        self._welcome = encode(Welcome(layout))

    def hold(self, blocks: list[int], tokens: int, readers: list[str], count: int) -> list[Held]:
        """So many requests more, each to be acknowledged by all ``readers``."""
        return [self._hold(blocks, tokens, readers) for _ in range(count)]

    def held(self) -> int:
        """Requests that have not been acknowledged by all."""
        with self._lock:
            return len(self._grants)

    def _hold(self, blocks: list[int], tokens: int, readers: list[str]) -> Held:
        with self._lock:
            grant = self._grants.offer(draw(), [blocks], tokens, draw())
            names = (self._grants.incarnation, grant.name, grant.nonce, draw(), draw())
            claim = Claim(*names, readers, tokens, grant.token_hash)
            granted = self._grants.answer(claim)
        if not isinstance(granted, Granted):
            raise TransferError("a producer does not grant its own offer")
        return Held(grant.name, claim.claim, granted)

    def _answer(self, message: Request, respond: Respond) -> bytes | None:
        if isinstance(message, Hello):
            return self._welcome
        with self._lock:
            reply = self._grants.answer(message, lambda reply: respond(encode(reply)))
        return None if reply is None else encode(reply)


if __name__ == "__main__":
    run(Core)
