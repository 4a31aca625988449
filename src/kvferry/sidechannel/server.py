"""A producer's listener: one thread, no message that can end it, and no peer that can fill its memory.

A peer is read from only while it has taken all replies, so each holds at most one message here, in one direction, and
the messages that have not come whole are bounded together too. When there is no room for another connection, the oldest
makes room that has never sent a valid message. Whoever does not get on with what it began is dropped.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import cast

from kvferry.errors import MessageError, SideChannelError
from kvferry.protocol.authentication import Purpose, Seal
from kvferry.protocol.messages import MAX_REQUEST_BYTES, Request, decode_request
from kvferry.sidechannel.frames import Frame, cut, header, keep_alive
from kvferry.sidechannel.loop import LoopThread, Tick

logger = logging.getLogger(__name__)

Respond = Callable[[bytes], object]
"""Sends an encoded reply later, once, from any thread."""

Answer = Callable[[Request, Respond], bytes | None]
"""Gives the encoded reply to a message, or None when it will be sent later."""

PATIENCE_S = 10.0
"""For a first valid message, for the rest of a message that began to come, and for a reply to be taken on."""

MAX_PARTIAL_BYTES = 64 << 20
"""Of all messages together that have not come whole."""

MAX_SENDERS = 1 << 16
"""Clients whose last number is remembered. Only a client that knows the secret can add one; should there be more, the
messages of the one not heard of for longest could be replayed, which then repeats what grants answer a second time
without harm."""

CHUNK_BYTES = 1 << 16
"""Taken from one peer before the others have their turn."""

BACKLOG = 4096


def bind(host: str, port: int) -> socket.socket:
    """Listen on ``host``; ``*`` and ``::`` mean every address, IPv4 and IPv6.

    Raises:
        OSError, UnicodeError: that cannot be bound.
    """
    if host in ("*", "::") and socket.has_dualstack_ipv6():
        server = socket.create_server(("::", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    else:
        name = "0.0.0.0" if host == "*" else host
        family, _, _, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
        server = socket.create_server(address, family=family, backlog=BACKLOG)
    server.setblocking(False)
    return server


class _Peer(asyncio.BufferedProtocol):
    """A consumer's connection.

    Attributes:
        incoming: what came and is no whole frame yet, or waits until the peer has taken its replies.
        unsent: bytes that the peer has still to take, as of the last look.
        deadline: until when it must get on with what it began, None while it began nothing.
        proven: it has sent a valid message.
    """

    __slots__ = ("_listener", "deadline", "incoming", "proven", "transport", "unsent")

    transport: asyncio.Transport

    def __init__(self, listener: Listener, deadline: float) -> None:
        self.incoming = bytearray()
        self.unsent = 0
        self.deadline: float | None = deadline
        self.proven = False
        self._listener = listener

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=0)  # any byte left unsent pauses
        self._listener._add(self)
        keep_alive(transport)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return self._listener._chunk

    def buffer_updated(self, nbytes: int) -> None:
        self._listener._serve(self, self._listener._chunk[:nbytes])

    def pause_writing(self) -> None:
        self.unsent = self.transport.get_write_buffer_size()
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        self.unsent = 0
        self.transport.resume_reading()
        self._listener._serve(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._listener._drop(self)


class Listener:
    """Binds at once, answers from a thread of its own until ``close``.

    Args:
        host: address to bind.
        port: 0 lets the system choose; ``port`` tells what was bound.
        answer, tick: called on the listener's thread.
        seal: decides whom to listen to. Messages it does not accept, and repeated ones, get no answer.
        max_connections: at once; None for half of the files that the process may have open.
        patience: seconds, ``PATIENCE_S``.

    Raises:
        SideChannelError: the address cannot be bound.
    """

    def __init__(
        self,
        host: str,
        port: int,
        answer: Answer,
        tick: Tick,
        seal: Seal | None = None,
        max_connections: int | None = None,
        patience: float = PATIENCE_S,
    ) -> None:
        self._answer = answer
        self._seal = seal or Seal()
        self._patience = patience
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_connections = max_connections or (files // 2 if files > 0 else 1 << 16)
        try:
            self._server = bind(host, port)
        except (OSError, UnicodeError) as error:
            raise SideChannelError(
                f"cannot bind the KVFerry side channel to {host}:{port}: {error}. Set another side_channel_port or "
                f"side_channel_host in kv_connector_extra_config; without a port the system chooses a free one"
            ) from error
        self.port = int(self._server.getsockname()[1])
        self._ignored = 0
        self._peers: set[_Peer] = set()
        self._strangers: OrderedDict[_Peer, None] = OrderedDict()
        self._partial = 0
        self._last_numbers: OrderedDict[bytes, int] = OrderedDict()
        self._chunk = memoryview(bytearray(CHUNK_BYTES))
        self._thread = LoopThread("kvferry-listener", tick, self._drop_all)
        self._thread.start(self._accept(), self._sweep())

    @property
    def ignored(self) -> int:
        """Messages and peers that got no answer, since the start: not of this protocol, not signed, repeated."""
        return self._ignored

    @property
    def connections(self) -> int:
        """Peers connected now."""
        return len(self._peers)

    def close(self) -> None:
        """Stop answering and give the port back. Safe to call twice."""
        self._thread.close()

    async def _accept(self) -> None:
        """Let peers in.

        asyncio's own server would let thousands in before they can be counted, and nobody for a second when the process
        has no file left, where strangers are to make room.
        """
        loop = self._thread.loop
        with self._server:
            while True:
                await self._readable()
                try:
                    # Not loop.sock_accept: cancelled at the wrong moment, it leaves open what it has accepted.
                    sock, address = self._server.accept()
                except BlockingIOError:
                    continue
                except OSError as error:
                    full = error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
                    # Else that peer has left already; a dropped one's file is closed in the loop's next turn.
                    await asyncio.sleep(1.0 if full and not self._make_room() else 0.0)
                    continue
                if not self._seal.admits(address[0]):
                    self._ignore(
                        f"{address[0]} is no address of a private network, and there is no secret: set KVFERRY_SECRET "
                        "or secret_file, or allow_public_peers"
                    )
                    sock.close()
                elif len(self._peers) >= self._max_connections and not self._make_room():
                    sock.close()
                else:
                    sock.setblocking(False)
                    peer = _Peer(self, loop.time() + self._patience)
                    try:
                        await loop.connect_accepted_socket(lambda peer=peer: peer, sock)  # type: ignore[misc]
                    except BaseException:
                        sock.close()  # the listener is being closed, and its loop may not get round to it
                        raise

    async def _readable(self) -> None:
        """Somebody wants to be let in."""
        loop = self._thread.loop
        somebody = asyncio.Event()
        loop.add_reader(self._server, somebody.set)
        try:
            await somebody.wait()
        finally:
            loop.remove_reader(self._server)

    def _make_room(self) -> bool:
        """Drop the oldest stranger; False if all peers are known."""
        if not self._strangers:
            return False
        self._drop(next(iter(self._strangers)))
        return True

    def _add(self, peer: _Peer) -> None:
        self._peers.add(peer)
        self._strangers[peer] = None

    def _drop(self, peer: _Peer) -> None:
        if peer in self._peers:
            self._peers.remove(peer)
            self._strangers.pop(peer, None)
            self._partial -= len(peer.incoming)
            peer.transport.abort()

    def _drop_all(self) -> None:
        for peer in list(self._peers):
            self._drop(peer)

    def _serve(self, peer: _Peer, data: memoryview | bytes = b"") -> None:
        """Answer what has come whole, while the peer takes the answers."""
        before = len(peer.incoming)
        peer.incoming += data
        try:
            while not peer.unsent and (frame := cut(peer.incoming, MAX_REQUEST_BYTES)):
                self._handle(peer, frame)
        except MessageError as error:
            self._ignore(str(error))
            peer.transport.abort()
        finally:
            self._partial += len(peer.incoming) - before
        if peer.proven and not (peer.unsent or peer.incoming):
            peer.deadline = None
        elif peer.deadline is None:
            peer.deadline = self._thread.loop.time() + self._patience
        if self._partial > MAX_PARTIAL_BYTES:
            self._drop(max(self._peers, key=lambda peer: len(peer.incoming)))

    def _handle(self, peer: _Peer, frame: Frame) -> None:
        if not self._is_new(frame):
            return
        try:
            message = decode_request(frame.body)
        except MessageError as error:
            self._ignore(str(error))
            return
        peer.proven, peer.deadline = True, None
        self._strangers.pop(peer, None)
        respond = partial(self._respond_later, peer, frame.sender, frame.number)
        try:
            reply = self._answer(message, respond)
        except Exception:
            logger.exception("the KVFerry listener could not answer a message")
            return
        if reply is not None:
            self._respond(peer, frame.sender, frame.number, reply)

    def _respond_later(self, peer: _Peer, sender: bytes, number: int, reply: bytes) -> None:
        self._thread.call(partial(self._respond, peer, sender, number, reply))

    def _respond(self, peer: _Peer, sender: bytes, number: int, reply: bytes) -> None:
        if peer not in self._peers:
            return
        # In one piece: `writelines` never pauses a protocol in the first releases of 3.12 and 3.13 (CVE-2024-12254).
        peer.transport.write(header(self._seal, Purpose.REPLY, sender, number, reply) + reply)
        if peer.unsent and peer.deadline is None:
            peer.deadline = self._thread.loop.time() + self._patience

    def _is_new(self, frame: Frame) -> bool:
        """Whether a frame is signed, and not one that was heard before."""
        if not frame.signed_by(self._seal, Purpose.REQUEST):
            self._ignore("it is not signed with this engine's secret; do all instances share it?")
            return False
        if not self._seal.has_secret:
            return True  # a number that anybody can make up says nothing
        if frame.number <= self._last_numbers.get(frame.sender, -1):
            self._ignore("it was sent before: somebody repeats messages")
            return False
        self._last_numbers[frame.sender] = frame.number
        self._last_numbers.move_to_end(frame.sender)
        if len(self._last_numbers) > MAX_SENDERS:
            self._last_numbers.popitem(last=False)
        return True

    async def _sweep(self) -> None:
        """Drop who has not got on. Once a second: there may be many peers."""
        while True:
            await asyncio.sleep(min(1.0, self._patience))
            now = self._thread.loop.time()
            for peer in list(self._peers):
                unsent = peer.transport.get_write_buffer_size() if peer.unsent else 0
                if unsent < peer.unsent:
                    peer.unsent, peer.deadline = unsent, now + self._patience
                elif peer.deadline is not None and peer.deadline <= now:
                    self._drop(peer)

    def _ignore(self, why: str) -> None:
        self._ignored += 1
        if self._ignored == 1:
            logger.warning("ignoring a message on the side channel (further ones are only counted): %s", why)
