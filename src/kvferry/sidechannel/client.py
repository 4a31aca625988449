"""Requests to any number of producers' listeners from one thread, which nobody waits for."""

from __future__ import annotations

import errno
import itertools
import logging
import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.errors import MessageError
from kvferry.protocol.authentication import Purpose, Seal
from kvferry.protocol.messages import MAX_REPLY_BYTES, Address, Reply, Request, decode_reply, encode
from kvferry.sidechannel.frames import SENDER_BYTES, Connection, Frame, header
from kvferry.sidechannel.sockets import SocketAddress, Wake, is_literal, resolve

logger = logging.getLogger(__name__)

OnReply = Callable[[Reply | None], None]
"""Gets the reply, or None when there was none in time. Called on the client's thread: it must not wait."""

Tick = Callable[[], float | None]

LONGEST_WAIT_S = 1.0

MAX_UNSENT_BYTES = 16 << 20
"""For a peer that takes nothing more; beyond it, it counts as lost."""


@dataclass(slots=True)
class _Pending:
    deadline: float
    on_reply: OnReply


@dataclass(slots=True)
class _Outgoing:
    address: Address
    body: bytes
    timeout: float
    on_reply: OnReply


@dataclass(slots=True, eq=False)
class _Peer:
    """A producer's side channel.

    Attributes:
        candidates: what its name resolved to and was not tried yet; None while that is not known.
        connection: None while there is none; what is to be sent then waits in ``pending``.
        pending: requests without a reply, by number.
        unsent: frames for a connection that is not established.
    """

    address: Address
    candidates: list[SocketAddress] | None = None
    connection: Connection | None = None
    established: bool = False
    pending: dict[int, _Pending] = field(default_factory=dict)
    unsent: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class _Resolved:
    peer: _Peer
    found: list[SocketAddress] | Exception


class Client:
    """Sends requests and hands back replies. A dead or slow peer delays nobody but its own callers.

    Messages to one address arrive in the order they were sent. A connection that cannot be made or breaks off answers
    what was sent over it with None at once.

    Args:
        name: of the thread.
        tick: called on the client's thread between messages; returns seconds until it wants to be called again.
        seal: signs requests and decides which replies to believe.
    """

    def __init__(self, name: str, tick: Tick | None = None, seal: Seal | None = None) -> None:
        self._tick = tick or (lambda: None)
        self._seal = seal or Seal()
        self._sender = secrets.token_bytes(SENDER_BYTES)
        self._numbers = itertools.count()
        self._inbox: queue.SimpleQueue[_Outgoing | _Resolved | None] = queue.SimpleQueue()
        self._peers: dict[Address, _Peer] = {}
        self._ignored = 0
        self._wake = Wake()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def ignored(self) -> int:
        """Replies that were not believed, since the start."""
        return self._ignored

    def send(self, address: Address, message: Request, timeout: float, on_reply: OnReply) -> None:
        """Send ``message``; ``on_reply`` is called exactly once, within ``timeout`` seconds."""
        if self._closed:
            self._call(on_reply, None)
            return
        self._inbox.put(_Outgoing(address, encode(message), timeout, on_reply))
        self.wake()

    def wake(self) -> None:
        """Have ``tick`` called soon, from any thread."""
        self._wake.set()

    def close(self) -> None:
        """Stop; callbacks still pending are called with None. Safe to call twice."""
        if self._thread.is_alive():
            self._closed = True
            self._inbox.put(None)
            self.wake()
            self._thread.join(timeout=5)
        self._wake.close()
        self._selector.close()

    def _run(self) -> None:
        running = True
        while running:
            try:
                for key, _ in self._selector.select(self._wait()):
                    if key.fileobj is self._wake:
                        self._wake.clear()
                    else:
                        self._serve(key.data)
                running = self._take_all()
                self._time_out()
            except Exception:
                logger.exception("a KVFerry side-channel client goes on after an error")
        for peer in list(self._peers.values()):
            self._lose(peer)

    def _wait(self) -> float:
        wishes = [LONGEST_WAIT_S]
        wish = self._tick()
        if wish is not None:
            wishes.append(wish)
        now = time.monotonic()
        wishes += [pending.deadline - now for peer in self._peers.values() for pending in peer.pending.values()]
        return max(0.0, min(wishes))

    def _take_all(self) -> bool:
        while not self._inbox.empty():
            match self._inbox.get():
                case None:
                    return False
                case _Resolved(peer, found):
                    self._resolved(peer, found)
                case _Outgoing() as item:
                    self._send(item)
        return True

    def _send(self, item: _Outgoing) -> None:
        peer = self._peers.get(item.address)
        if peer is None:
            peer = self._peers[item.address] = _Peer(item.address)
            self._find(peer)
        number = next(self._numbers)
        peer.pending[number] = _Pending(time.monotonic() + item.timeout, item.on_reply)
        peer.unsent += [header(self._seal, Purpose.REQUEST, self._sender, number, item.body), item.body]
        self._push(peer)

    def _find(self, peer: _Peer) -> None:
        """Resolve the peer's name, on a thread of its own if a name server may have to be asked."""

        def find() -> None:
            try:
                found: list[SocketAddress] | Exception = resolve(*peer.address)
            except (OSError, UnicodeError) as error:
                found = error
            self._inbox.put(_Resolved(peer, found))
            self.wake()

        if is_literal(peer.address[0]):
            find()
        else:
            threading.Thread(target=find, name="kvferry-resolve", daemon=True).start()

    def _resolved(self, peer: _Peer, found: list[SocketAddress] | Exception) -> None:
        if self._peers.get(peer.address) is not peer:
            return  # nobody waited that long
        if isinstance(found, Exception):
            self._lose(peer, found)
            return
        peer.candidates = found
        self._connect(peer)

    def _connect(self, peer: _Peer, error: Exception | None = None) -> None:
        """Try the next of the peer's addresses."""
        while peer.candidates:
            family, address = peer.candidates.pop(0)
            try:
                sock = socket.socket(family, socket.SOCK_STREAM)
            except OSError as failure:
                error = failure
                continue
            peer.connection = Connection(sock, MAX_REPLY_BYTES)
            failed = sock.connect_ex(address)
            if failed in (0, errno.EINPROGRESS):
                self._selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)
                return
            error = OSError(failed, "cannot connect")
            peer.connection.close()
            peer.connection = None
        self._lose(peer, error)

    def _push(self, peer: _Peer) -> None:
        """Send what waits for a connection, if there is one."""
        connection = peer.connection
        if connection is None or not peer.established:
            if sum(map(len, peer.unsent)) > MAX_UNSENT_BYTES:
                self._lose(peer)
            return
        unsent, peer.unsent = peer.unsent, []
        try:
            connection.send(*unsent)
        except OSError as error:
            self._lose(peer, error)
            return
        if connection.unsent > MAX_UNSENT_BYTES:
            self._lose(peer)
            return
        writing = selectors.EVENT_WRITE if connection.owes else 0
        self._selector.modify(connection.socket, selectors.EVENT_READ | writing, peer)

    def _serve(self, peer: _Peer) -> None:
        connection = peer.connection
        if connection is None or self._peers.get(peer.address) is not peer:
            return
        try:
            if not peer.established:
                failed = connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if failed:
                    self._unregister(peer)
                    self._connect(peer, OSError(failed, "cannot connect"))
                    return
                peer.established = True
            connection.receive()
            while frame := connection.next_frame():
                self._answered(peer, frame)
        except MessageError as error:
            logger.warning("%s:%d answered with what is not KVFerry's: %s", *peer.address, error)
            self._lose(peer)
        except OSError as error:
            self._lose(peer, error)
        else:
            self._push(peer)

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
        pending = peer.pending.pop(frame.number)
        try:
            reply: Reply | None = decode_reply(frame.body)
        except MessageError as error:
            logger.warning("%s:%d answered with what is not KVFerry's: %s", *peer.address, error)
            reply = None
        self._call(pending.on_reply, reply)

    def _time_out(self) -> None:
        now = time.monotonic()
        for peer in list(self._peers.values()):
            late = [number for number, pending in peer.pending.items() if pending.deadline <= now]
            callbacks = [peer.pending.pop(number).on_reply for number in late]
            if late and not peer.pending:
                self._lose(peer)  # with whatever is still queued for it
            for on_reply in callbacks:
                self._call(on_reply, None)

    def _unregister(self, peer: _Peer) -> None:
        if peer.connection is not None:
            self._selector.unregister(peer.connection.socket)
            peer.connection.close()
            peer.connection = None

    def _lose(self, peer: _Peer, error: Exception | None = None) -> None:
        """Forget a peer and answer what waits for it; the next request meets it anew."""
        del self._peers[peer.address]
        self._unregister(peer)
        if error is not None and peer.pending:
            logger.warning("no connection to %s:%d: %s", *peer.address, error)
        for pending in peer.pending.values():
            self._call(pending.on_reply, None)

    @staticmethod
    def _call(on_reply: OnReply, reply: Reply | None) -> None:
        try:
            on_reply(reply)
        except Exception:
            logger.exception("handling a side-channel reply failed")
