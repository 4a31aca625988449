"""Binding an address, finding one, and ending another thread's wait."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

BACKLOG = 4096

SocketAddress = tuple[socket.AddressFamily, tuple[str, int] | tuple[str, int, int, int]]


def bind(host: str, port: int) -> socket.socket:
    """Listen on ``host``, without waiting in ``accept``; ``*`` and ``::`` mean every address, IPv4 and IPv6.

    Raises:
        OSError, UnicodeError: that cannot be bound.
    """
    if host in ("*", "::") and socket.has_dualstack_ipv6():
        server = socket.create_server(("::", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    elif host == "*":
        server = socket.create_server(("0.0.0.0", port), backlog=BACKLOG)
    else:
        family, address = resolve(host, port)[0]
        server = socket.create_server(address, family=family, backlog=BACKLOG)
    server.setblocking(False)
    return server


def is_literal(host: str) -> bool:
    """Whether ``host`` is an address, which takes no name server to resolve."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def resolve(host: str, port: int) -> list[SocketAddress]:
    """Where to connect to, best first. Waits for a name server if ``host`` is a name.

    Raises:
        OSError, UnicodeError: there is no such host.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, address) for family, _, _, _, address in found]  # type: ignore[misc]


class Wake:
    """Ends another thread's wait in a selector; ``set`` may be called from any thread, any number of times."""

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
