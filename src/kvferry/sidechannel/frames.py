"""Frames on a TCP connection, and a connection that is never waited for.

    length  4 bytes, big endian: of all that follows
    mac    32 bytes: HMAC over the rest; zeros without a secret
    sender 16 bytes: drawn by each client
    number  8 bytes, big endian: counts up for each sender; a reply repeats both
    body    a message

A length beyond the limit ends the connection before anything is kept, so a peer can make this side hold one message
and no more. (ZeroMQ limits the parts of a message, not their number: one peer can fill the memory.)
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from itertools import islice
from typing import NamedTuple

from kvferry.errors import MessageError
from kvferry.protocol.authentication import Purpose, Seal

_HEADER = struct.Struct(">I32s16sQ")
_LENGTH = struct.Struct(">I")

SENDER_BYTES = 16
CHUNK_BYTES = 1 << 16
PARTS_AT_ONCE = 64


class Frame(NamedTuple):
    """One frame as it came, not checked yet."""

    mac: bytes
    sender: bytes
    number: int
    body: bytes

    def signed_by(self, seal: Seal, purpose: Purpose) -> bool:
        return seal.accepts(self.mac, purpose, self.sender, self.number.to_bytes(8, "big"), self.body)


def header(seal: Seal, purpose: Purpose, sender: bytes, number: int, body: bytes) -> bytes:
    """What goes before ``body``."""
    mac = seal.sign(purpose, sender, number.to_bytes(8, "big"), body)
    return _HEADER.pack(_HEADER.size - _LENGTH.size + len(body), mac, sender, number)


class Connection:
    """A non-blocking socket with what came in and what must go out.

    Args:
        sock: connected, or on its way to be.
        largest: bytes of the largest body that is taken.
    """

    def __init__(self, sock: socket.socket, largest: int) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A peer that vanished without a word is noticed after a minute.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            with contextlib.suppress(AttributeError):  # not every system can set them
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self.socket = sock
        self._limit = _HEADER.size - _LENGTH.size + largest
        self._incoming = bytearray()
        self._outgoing: deque[memoryview] = deque()

    @property
    def partial(self) -> int:
        """Bytes that came and are no whole frame yet, or have not been asked for."""
        return len(self._incoming)

    @property
    def unsent(self) -> int:
        """Bytes that the peer has not taken yet."""
        return sum(map(len, self._outgoing))

    @property
    def owes(self) -> bool:
        return bool(self._outgoing)

    def receive(self) -> None:
        """Take what is there, up to a chunk. Raises ``OSError`` when the connection has ended."""
        with contextlib.suppress(BlockingIOError):
            data = self.socket.recv(CHUNK_BYTES)
            if not data:
                raise ConnectionResetError("closed by the peer")
            self._incoming += data

    def next_frame(self) -> Frame | None:
        """The next whole frame. Raises ``MessageError`` for a length that no frame has: nothing after it is one."""
        if len(self._incoming) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._incoming)
        if not _HEADER.size - _LENGTH.size <= length <= self._limit:
            raise MessageError(f"a frame of {length} bytes, where {self._limit} is the limit")
        end = _LENGTH.size + length
        if len(self._incoming) < end:
            return None
        _, mac, sender, number = _HEADER.unpack_from(self._incoming)
        with memoryview(self._incoming) as view:
            body = bytes(view[_HEADER.size : end])
        del self._incoming[:end]
        return Frame(mac, sender, number, body)

    def send(self, *parts: bytes) -> None:
        """Send now what can be sent, and the rest with ``flush``. Bytes are not copied. Raises ``OSError``."""
        self._outgoing.extend(memoryview(part) for part in parts if part)
        self.flush()

    def flush(self) -> bool:
        """Whether anything could be sent. Raises ``OSError`` when the connection has ended."""
        progress = False
        with contextlib.suppress(BlockingIOError):
            while self._outgoing:
                sent = self.socket.sendmsg(islice(self._outgoing, PARTS_AT_ONCE))
                progress = True
                while sent:
                    part = self._outgoing.popleft()
                    if sent < len(part):
                        self._outgoing.appendleft(part[sent:])
                    sent -= min(sent, len(part))
        return progress

    def close(self) -> None:
        self.socket.close()
