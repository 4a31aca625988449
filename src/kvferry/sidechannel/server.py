"""A producer's listener: one thread, no message that can end it, and no peer that can fill its memory.

A peer is read from only while it has taken all replies, so each holds at most one message here, in one direction, and
the messages that have not come whole are bounded together too. When there is no room for another connection, the oldest
makes room that has never sent a valid message. Whoever does not get on with what it began is dropped.
"""

from __future__ import annotations

import errno
import logging
import resource
import selectors
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from kvferry.errors import MessageError, SideChannelError
from kvferry.protocol.authentication import Purpose, Seal
from kvferry.protocol.messages import MAX_REQUEST_BYTES, Request, decode_request
from kvferry.sidechannel.frames import Connection, Frame, header
from kvferry.sidechannel.sockets import Wake, bind

logger = logging.getLogger(__name__)

Answer = Callable[[Request], bytes]
"""Gives the encoded reply to a message."""

Tick = Callable[[], float | None]
"""Called between messages; returns seconds until it wants to be called again, None for no wish."""

LONGEST_WAIT_S = 1.0

PATIENCE_S = 10.0
"""For a first valid message, for the rest of a message that began to come, and for a reply to be taken on."""

MAX_PARTIAL_BYTES = 64 << 20
"""Of all messages together that have not come whole."""

MAX_SENDERS = 1 << 16
"""Clients whose last number is remembered. Only a client that knows the secret can add one; should there be more, the
messages of the one not heard of for longest could be replayed, which then repeats what grants answer a second time
without harm."""

ACCEPTS_AT_ONCE = 64


class _Peer(Connection):
    """A consumer's connection.

    Attributes:
        deadline: until when it must get on with what it began, None while it began nothing.
        proven: it has sent a valid message.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, MAX_REQUEST_BYTES)
        self.deadline: float | None = None
        self.proven = False
        self.events = selectors.EVENT_READ


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
        self._tick = tick
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
        self._next_sweep = 0.0
        self._accepting = True
        self._wake = Wake()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._selector.register(self._server, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="kvferry-listener", daemon=True)
        self._thread.start()

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
        if self._thread.is_alive():
            self._wake.set()
            self._thread.join(timeout=5)
        for peer in self._peers:
            peer.close()
        self._server.close()
        self._wake.close()
        self._selector.close()

    def _run(self) -> None:
        while True:
            try:
                for key, _ in self._selector.select(self._wait()):
                    if key.fileobj is self._wake:
                        return
                    if key.fileobj is self._server:
                        self._accept()
                    elif key.data in self._peers:  # else another peer's message has just cost it its place
                        self._serve(key.data)
                self._sweep()
            except Exception:
                # Whatever a peer sent, the next message is answered.
                logger.exception("the KVFerry listener goes on after an error")

    def _wait(self) -> float:
        wish = self._tick()
        return LONGEST_WAIT_S if wish is None else min(LONGEST_WAIT_S, max(0.0, wish))

    def _accept(self) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                sock, address = self._server.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM) and not self._make_room():
                    self._accepting = False  # until the next sweep: the peer stays in the queue, and would wake us
                    self._selector.unregister(self._server)
                    return
                continue  # that peer has left already
            if not self._seal.admits(address[0]):
                self._ignore(
                    f"{address[0]} is no address of a private network, and there is no secret: set KVFERRY_SECRET or "
                    "secret_file, or allow_public_peers"
                )
                sock.close()
            elif len(self._peers) >= self._max_connections and not self._make_room():
                sock.close()
            else:
                self._add(_Peer(sock))

    def _make_room(self) -> bool:
        """Drop the oldest stranger; False if all peers are known."""
        if not self._strangers:
            return False
        self._drop(next(iter(self._strangers)))
        return True

    def _add(self, peer: _Peer) -> None:
        peer.deadline = time.monotonic() + self._patience
        self._peers.add(peer)
        self._strangers[peer] = None
        self._selector.register(peer.socket, peer.events, peer)

    def _drop(self, peer: _Peer) -> None:
        self._peers.remove(peer)
        self._strangers.pop(peer, None)
        self._partial -= peer.partial
        self._selector.unregister(peer.socket)
        peer.close()

    def _serve(self, peer: _Peer) -> None:
        before = peer.partial
        try:
            if not peer.owes:
                peer.receive()
            elif peer.flush() and peer.proven:
                peer.deadline = None
            while not peer.owes and (frame := peer.next_frame()):
                self._handle(peer, frame)
        except MessageError as error:
            self._ignore(str(error))
            gone = True
        except OSError:
            gone = True
        else:
            gone = False
        self._partial += peer.partial - before
        if gone:
            self._drop(peer)
            return
        self._watch(peer)
        if self._partial > MAX_PARTIAL_BYTES:
            self._drop(max(self._peers, key=lambda peer: peer.partial))

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
        try:
            reply = self._answer(message)
        except Exception:
            logger.exception("the KVFerry listener could not answer a message")
            return
        peer.send(header(self._seal, Purpose.REPLY, frame.sender, frame.number, reply), reply)

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

    def _watch(self, peer: _Peer) -> None:
        """Wait for what the peer has to do next, and not for ever."""
        events = selectors.EVENT_WRITE if peer.owes else selectors.EVENT_READ
        if events != peer.events:
            peer.events = events
            self._selector.modify(peer.socket, events, peer)
        if peer.deadline is None and (peer.owes or peer.partial):
            peer.deadline = time.monotonic() + self._patience
        elif peer.proven and not (peer.owes or peer.partial):
            peer.deadline = None

    def _sweep(self) -> None:
        """Drop who has not got on. Once a second: there may be many peers."""
        now = time.monotonic()
        if now < self._next_sweep:
            return
        self._next_sweep = now + min(1.0, self._patience)
        for peer in [peer for peer in self._peers if peer.deadline is not None and peer.deadline <= now]:
            self._drop(peer)
        if not self._accepting:
            self._accepting = True
            self._selector.register(self._server, selectors.EVENT_READ)

    def _ignore(self, why: str) -> None:
        self._ignored += 1
        if self._ignored == 1:
            logger.warning("ignoring a message on the side channel (further ones are only counted): %s", why)
