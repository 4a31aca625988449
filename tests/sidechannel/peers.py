"""Peers for tests of the side channel: honest ones with a deadline, and raw ones that send any bytes."""

import socket
import threading

from kvferry.protocol.authentication import Purpose, Seal
from kvferry.protocol.messages import encode
from kvferry.sidechannel.frames import cut, header

TOKEN = "1" * 32
DEADLINE_S = 10.0


class Replies:
    """Collects replies; ``wait`` blocks until there are so many."""

    def __init__(self) -> None:
        self.got: list = []
        self._change = threading.Condition()

    def __call__(self, reply) -> None:
        with self._change:
            self.got.append(reply)
            self._change.notify_all()

    def wait(self, count=1):
        with self._change:
            assert self._change.wait_for(lambda: len(self.got) >= count, DEADLINE_S), f"only {len(self.got)}"
        return self.got


def ask(client, port, message, timeout=DEADLINE_S, host="127.0.0.1"):
    replies = Replies()
    client.send((host, port), message, timeout, replies)
    return replies.wait()[0]


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)


def pack(message, number=0, sender=b"s" * 16, seal=None, purpose=Purpose.REQUEST):
    """A whole frame; ``message`` may be bytes that are none."""
    body = message if isinstance(message, bytes) else encode(message)
    return header(seal or Seal(), purpose, sender, number, body) + body


class Frames:
    """Takes whole frames off a socket, which waits as long as its timeout lets it."""

    def __init__(self, sock):
        self._sock = sock
        self._incoming = bytearray()

    def next(self):
        while (frame := cut(self._incoming, 1 << 20)) is None:
            data = self._sock.recv(1 << 16)
            if not data:
                raise ConnectionResetError("closed by the peer")
            self._incoming += data
        return frame


def closed_by_peer(sock):
    """Waits until the other end has closed, whatever it says before."""
    sock.settimeout(DEADLINE_S)
    try:
        while sock.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True
