"""Frames on a TCP connection.

    length  4 bytes, big endian: of all that follows
    mac    32 bytes: HMAC over the rest; zeros without a secret
    sender 16 bytes: drawn by each client
    number  8 bytes, big endian: counts up for each sender; a reply repeats both
    body    a message

A length beyond the limit ends the connection before anything is kept, so a peer can make this side hold one message
and no more. (ZeroMQ limits the parts of a message, not their number: one peer can fill the memory.)
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import NamedTuple

from kvferry.errors import MessageError
from kvferry.protocol.authentication import Purpose, Seal

_HEADER = struct.Struct(">I32s16sQ")
_LENGTH = struct.Struct(">I")

SENDER_BYTES = 16


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


def cut(incoming: bytearray, largest: int) -> Frame | None:
    """Take the first frame off ``incoming``, None if it has not come whole; its body has at most ``largest`` bytes.

    Raises:
        MessageError: a length that no frame has; nothing after it is one.
    """
    if len(incoming) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(incoming)
    limit = _HEADER.size - _LENGTH.size + largest
    if not _HEADER.size - _LENGTH.size <= length <= limit:
        raise MessageError(f"a frame of {length} bytes, where {limit} is the limit")
    end = _LENGTH.size + length
    if len(incoming) < end:
        return None
    _, mac, sender, number = _HEADER.unpack_from(incoming)
    with memoryview(incoming) as view:
        body = bytes(view[_HEADER.size : end])
    del incoming[:end]
    return Frame(mac, sender, number, body)


def keep_alive(transport: asyncio.BaseTransport) -> None:
    """Have a peer that vanished without a word noticed after a minute."""
    sock = transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
