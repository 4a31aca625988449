"""Gives a prefilled prompt back that nobody will decode, so that the prefill instance need not wait for its lease."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Raw

from kvferry.errors import ParamsError
from kvferry.gateway.bodies import object_in
from kvferry.protocol.authentication import Seal
from kvferry.protocol.identity import draw
from kvferry.protocol.messages import Offer, Release, Released, Reply
from kvferry.sidechannel.client import Client

TIMEOUT_S = 5.0

Outcome = Callable[[str], None]
"""Told ``released``, ``unanswered``, or ``foreign`` for parameters that no producer of this protocol signed."""


class Releaser:
    """Sends releases from a thread of its own; ``release`` never waits and may be called while a task is cancelled."""

    def __init__(self, seal: Seal, outcome: Outcome) -> None:
        self._seal = seal
        self._outcome = outcome
        self._client = Client("kvferry-release", seal=seal)

    def release(self, parameters: Raw) -> None:
        """Give back what a prefill answer's parameters promise. A decode instance that reads it is not disturbed: its
        claim keeps the grant, and ends with its own acknowledgement or release.
        """
        try:
            offer = Offer.from_params(dict(object_in(parameters)), self._seal)
        except ParamsError:
            self._outcome("foreign")  # another connector's: its own time-out frees it
            return
        message = Release(offer.incarnation, offer.request, offer.nonce, draw())
        self._client.send(offer.address, message, TIMEOUT_S, self._answered)

    def _answered(self, reply: Reply | None) -> None:
        self._outcome("released" if isinstance(reply, Released) else "unanswered")

    def close(self) -> None:
        self._client.close()
