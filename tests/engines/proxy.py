"""A proxy for the side channel that can hold messages back, and cut the connection."""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvferry.errors import MessageError
from kvferry.protocol.messages import Address, decode_reply, decode_request

LENGTH = struct.Struct(">I")
HEADER_BYTES = 56  # mac, sender and number, see kvferry.sidechannel.frames
PATIENCE_S = 60.0


@dataclass
class Gate:
    """Messages of one type wait here until it is opened; `arrived` counts them."""

    opened: threading.Event = field(default_factory=threading.Event)
    arrived: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def await_arrivals(self, count: int) -> None:
        for _ in range(count):
            assert self.arrived.acquire(timeout=PATIENCE_S), "the message that was to be held did not come"


class Proxy:
    """Passes frames between consumers and one listener, each direction in a thread per connection."""

    def __init__(self, target: Address) -> None:
        self._target = target
        self._gates: dict[type, Gate] = {}
        self._whole = threading.Event()
        self._whole.set()
        self._sockets: set[socket.socket] = set()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address: Address = self._server.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self, kind: type) -> Gate:
        """Let messages or replies of this type wait."""
        return self._gates.setdefault(kind, Gate())

    def open(self) -> None:
        """Let everything pass, also what waits."""
        gates, self._gates = self._gates, {}
        for gate in gates.values():
            gate.opened.set()

    def cut(self) -> None:
        """End every connection, and every new one as soon as it is made, until ``heal``."""
        self._whole.clear()
        self._close_all()

    def heal(self) -> None:
        self._whole.set()

    def route(self, params: dict) -> dict:
        """The parameters, leading here instead of to the listener."""
        host, port = self.address
        return {**params, "remote_host": host, "remote_port": port}

    def close(self) -> None:
        self.open()
        self._server.close()
        self._close_all()

    def _close_all(self) -> None:
        for each in list(self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                consumer, _ = self._server.accept()
                if not self._whole.is_set():
                    consumer.close()
                    continue
                threading.Thread(target=self._join, args=(consumer,), daemon=True).start()

    def _join(self, consumer: socket.socket) -> None:
        with consumer, contextlib.suppress(OSError), socket.create_connection(self._target) as producer:
            self._sockets |= {consumer, producer}
            back = threading.Thread(target=self._pump, args=(producer, consumer, decode_reply), daemon=True)
            back.start()
            self._pump(consumer, producer, decode_request)
            back.join()

    def _pump(self, source: socket.socket, sink: socket.socket, decode: Callable[[bytes], object]) -> None:
        with contextlib.suppress(OSError):
            for frame in _frames(source):
                with contextlib.suppress(MessageError):
                    self._wait_at_gate(decode(frame[LENGTH.size + HEADER_BYTES :]))
                sink.sendall(frame)
        for each in (source, sink):  # either end gone, the other follows
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._sockets -= {source, sink}

    def _wait_at_gate(self, message: object) -> None:
        gate = self._gates.get(type(message))
        if gate is not None:
            gate.arrived.release()
            gate.opened.wait(PATIENCE_S)


def _frames(source: socket.socket) -> Iterator[bytes]:
    with source.makefile("rb") as stream:
        while len(length := stream.read(LENGTH.size)) == LENGTH.size:
            yield length + stream.read(*LENGTH.unpack(length))
