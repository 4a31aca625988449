"""TCP ports on the loopback interface."""

import random
import socket
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from kvferry.errors import PortInUseError

HOST = "127.0.0.1"
LOWEST = 15000
ATTEMPTS = 1000


def _bound(port: int, host: str = HOST) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError):
        listener.close()
        raise
    return listener


def free_ports(count: int) -> list[int]:
    """That many different ports which nobody listens on at the moment."""
    with ExitStack() as stack:
        return [stack.enter_context(_bound(0)).getsockname()[1] for _ in range(count)]


class PortChooser:
    """Chooses ports that are free now and will stay so for a process that binds them later.

    The system hands out ports of its ephemeral range to every connection that somebody opens, so a port from there may
    be taken while an engine loads, or is restarted. These lie below that range, at random, so that two that choose at
    once rarely meet; `taken` are ports promised to others.
    """

    def __init__(self, taken: Iterable[int] = ()) -> None:
        self._taken = set(taken)
        self._range = range(LOWEST, max(LOWEST + 1000, _ephemeral_start()))

    def require(self, port: int, host: str = HOST) -> int:
        """A port that somebody asked for.

        Raises:
            PortInUseError: it is taken, or promised to others.
        """
        if port in self._taken:
            raise PortInUseError(f"port {port} belongs to another instance or cluster; choose another one")
        require_free(port, host)
        self._taken.add(port)
        return port

    def prefer(self, port: int, host: str = HOST) -> int:
        """That port, or any where it cannot be had."""
        try:
            return self.require(port, host)
        except PortInUseError:
            return self.run()

    def run(self, count: int = 1) -> int:
        """The first of `count` neighbouring ports; they are not chosen again.

        Raises:
            PortInUseError: none was found.
        """
        for _ in range(ATTEMPTS):
            first = random.choice(self._range)
            ports = range(first, first + count)
            if self._taken.isdisjoint(ports) and all(map(is_free, ports)):
                self._taken.update(ports)
                return first
        raise PortInUseError(f"no {count} neighbouring free ports were found on {HOST}")


def _ephemeral_start() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768


def is_free(port: int, host: str = HOST) -> bool:
    """Whether the port can be bound now."""
    try:
        _bound(port, host).close()
    except (OSError, OverflowError):
        return False
    return True


def require_free(port: int, host: str = HOST) -> None:
    """Raises:
    PortInUseError: the port is taken, or may not be bound by this user.
    """
    try:
        _bound(port, host).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PortInUseError(f"port {port} on {host} cannot be used: {reason.lower()}; choose another one") from error
