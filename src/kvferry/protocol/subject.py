"""What a log line or a trace span is about, in one form everywhere."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.loads import Order
from kvferry.protocol.messages import Offer


@dataclass(frozen=True, slots=True)
class Subject:
    """A request, the producer that it loads from, and the layouts of both sides. Its text is made when it is logged.

    Attributes:
        request: this engine's id of it.
        here: this engine's layout, as ``EngineLayout.label`` writes it.
        peer: names the producer's incarnation, address and layout; None when nothing of that can be believed.
    """

    request: str
    here: str
    peer: Offer | Order | None = None

    def __str__(self) -> str:
        if self.peer is None:
            return f"request {self.request} (at {self.here})"
        host, port = self.peer.address
        layout = f" {self.peer.layout}" if self.peer.layout else ""  # whoever sends both legs at once does not know it
        return f"request {self.request} (from {self.peer.incarnation[:8]}{layout} at {host}:{port} to {self.here})"
