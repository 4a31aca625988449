"""TCP ports on the loopback interface."""

import socket
from contextlib import ExitStack

from kvferry.errors import PortInUseError

HOST = "127.0.0.1"


def _bound(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except (OSError, OverflowError):
        listener.close()
        raise
    return listener


def free_ports(count: int) -> list[int]:
    """That many different ports which nobody listens on at the moment."""
    with ExitStack() as stack:
        return [stack.enter_context(_bound(0)).getsockname()[1] for _ in range(count)]


def require_free(port: int) -> None:
    """Raises:
    PortInUseError: the port is taken, or may not be bound by this user.
    """
    try:
        _bound(port).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PortInUseError(f"port {port} on {HOST} cannot be used: {reason.lower()}; choose another one") from error
