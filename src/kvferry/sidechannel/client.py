"""Requests to any number of producers' listeners from one thread, which nobody waits for."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

from kvferry.errors import MessageError
from kvferry.protocol.authentication import Purpose, Seal
from kvferry.protocol.messages import MAX_REPLY_BYTES, Address, Reply, Request, decode_reply, encode
from kvferry.sidechannel.frames import SENDER_BYTES, Frame, cut, header, keep_alive
from kvferry.sidechannel.loop import LoopThread, Tick

logger = logging.getLogger(__name__)

OnReply = Callable[[Reply | None], None]
"""Gets the reply, or None when there was none in time. Called on the client's thread: it must not wait."""

MAX_UNSENT_BYTES = 16 << 20
"""For a peer that takes nothing more; beyond it, it counts as lost."""


class _Pending(NamedTuple):
    timer: asyncio.TimerHandle
    on_reply: OnReply


class _Peer(asyncio.Protocol):
    """A producer's side channel.

    Attributes:
        connecting: makes the connection.
        pending: requests without a reply, by number.
    """

    connecting: asyncio.Task[None]

    def __init__(self, client: Client, address: Address) -> None:
        self.address = address
        self.pending: dict[int, _Pending] = {}
        self._client = client
        self._incoming = bytearray()
        self._early = bytearray()  # frames for a connection that is not established
        self._transport: asyncio.Transport | None = None

    @property
    def unsent(self) -> int:
        """Bytes that the peer has not taken yet."""
        return len(self._early) if self._transport is None else self._transport.get_write_buffer_size()

    def send(self, frame: bytes) -> None:
        if self._transport is None:
            self._early += frame
        else:
            self._transport.write(frame)

    def abort(self) -> None:
        """End the connection, or the attempt to make one."""
        self.connecting.cancel()
        self._early.clear()
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        keep_alive(transport)
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(bytes(self._early))
        self._early.clear()

    def data_received(self, data: bytes) -> None:
        self._incoming += data
        try:
            while frame := cut(self._incoming, MAX_REPLY_BYTES):
                self._client._answered(self, frame)
        except MessageError as error:
            self._client._lose(self, error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client._lose(self, exc)


class Client:
    """Sends requests and hands back replies. A dead or slow peer delays nobody but its own callers.

    Messages to one address arrive in the order they were sent. A connection that cannot be made or breaks off answers
    what was sent over it with None at once.

    Args:
        name: of the thread.
        tick: called on the client's thread, also after replies.
        seal: signs requests and decides which replies to believe.
    """

    def __init__(self, name: str, tick: Tick | None = None, seal: Seal | None = None) -> None:
        self._seal = seal or Seal()
        self._sender = secrets.token_bytes(SENDER_BYTES)
        self._numbers = itertools.count()
        self._peers: dict[Address, _Peer] = {}
        self._ignored = 0
        self._thread = LoopThread(name, tick or (lambda: None), self._lose_all)
        self._thread.start()

    @property
    def ignored(self) -> int:
        """Replies that were not believed, since the start."""
        return self._ignored

    def send(self, address: Address, message: Request, timeout: float, on_reply: OnReply) -> None:
        """Send ``message``; ``on_reply`` is called exactly once, within ``timeout`` seconds."""
        if not self._thread.call(partial(self._send, address, encode(message), timeout, on_reply)):
            self._call(on_reply, None)

    def call(self, function: Callable[[], object]) -> bool:
        """Have a function called on the client's thread, from any thread, in order; False if it never will be."""
        return self._thread.call(function)

    def wake(self) -> None:
        """Have ``tick`` called soon, from any thread."""
        self._thread.call(self._thread.tick)

    def close(self) -> None:
        """Stop; callbacks still pending are called with None. Safe to call twice."""
        self._thread.close()

    def _send(self, address: Address, body: bytes, timeout: float, on_reply: OnReply) -> None:
        loop = self._thread.loop
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = _Peer(self, address)
            peer.connecting = loop.create_task(self._connect(peer))
        number = next(self._numbers)
        peer.pending[number] = _Pending(loop.call_later(timeout, self._late, peer, number), on_reply)
        peer.send(header(self._seal, Purpose.REQUEST, self._sender, number, body) + body)
        if peer.unsent > MAX_UNSENT_BYTES:
            self._lose(peer)

    async def _connect(self, peer: _Peer) -> None:
        host, port = peer.address
        try:
            await self._thread.loop.create_connection(lambda: peer, host, port)
        except Exception as error:  # whatever it is, what waits for the connection gets its answer
            self._lose(peer, error)

    def _answered(self, peer: _Peer, frame: Frame) -> None:
        if frame.sender != self._sender or frame.number not in peer.pending:
            return  # an answer that came too late, or no answer of ours
        if not frame.signed_by(self._seal, Purpose.REPLY):
            self._ignored += 1
            if self._ignored == 1:
                logger.warning(
                    "ignoring a reply of %s:%d that is not signed with this engine's secret (further ones are only "
                    "counted); do all instances share it?",
                    *peer.address,
                )
            return
        timer, on_reply = peer.pending.pop(frame.number)
        timer.cancel()
        try:
            reply: Reply | None = decode_reply(frame.body)
        except MessageError as error:
            logger.warning("%s:%d answered with what is not KVFerry's: %s", *peer.address, error)
            reply = None
        self._call(on_reply, reply)
        self._thread.tick()  # an answer may bring forward what is due

    def _late(self, peer: _Peer, number: int) -> None:
        _, on_reply = peer.pending.pop(number)
        if not peer.pending:
            self._lose(peer)  # with whatever is still queued for it
        self._call(on_reply, None)

    def _lose(self, peer: _Peer, error: Exception | None = None) -> None:
        """Forget a peer and answer what waits for it; the next request meets it anew."""
        if self._peers.get(peer.address) is not peer:
            return
        del self._peers[peer.address]
        peer.abort()
        if error is not None and peer.pending:
            logger.warning("no connection to %s:%d: %s", *peer.address, error)
        for timer, on_reply in peer.pending.values():
            timer.cancel()
            self._call(on_reply, None)
        peer.pending.clear()

    def _lose_all(self) -> None:
        for peer in list(self._peers.values()):
            self._lose(peer)

    @staticmethod
    def _call(on_reply: OnReply, reply: Reply | None) -> None:
        try:
            on_reply(reply)
        except Exception:
            logger.exception("handling a side-channel reply failed")
