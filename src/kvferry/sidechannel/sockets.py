"""ZeroMQ endpoints and limits that both ends share."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

import zmq

HANDSHAKE_TIMEOUT_MS = 10_000
"""A peer that connects and does not speak ZeroMQ is dropped after this."""


def endpoint(host: str, port: int | str) -> str:
    """``tcp://host:port``, with brackets around an IPv6 address."""
    return f"tcp://[{host}]:{port}" if _is_ipv6(host) else f"tcp://{host}:{port}"


def configure(sock: zmq.Socket[bytes], max_message: int) -> None:
    """Options without which a socket lingers at exit, grows without bound or knows IPv4 only."""
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.IPV6, 1)
    sock.setsockopt(zmq.MAXMSGSIZE, max_message)
    sock.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
    sock.setsockopt(zmq.TCP_KEEPALIVE, 1)
    sock.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    sock.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
    sock.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


class Wake:
    """Ends another thread's wait in a poller; ``set`` may be called from any thread, any number of times."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """What the waiting thread polls."""
        return self._reader.fileno()

    def set(self) -> None:
        with contextlib.suppress(OSError):  # full: it is set already; closed: nobody waits any more
            self._writer.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
