"""Requests to any number of producers' listeners from one thread, which nobody waits for."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from kvferry.errors import MessageError
from kvferry.protocol.messages import MAX_REPLY_BYTES, Address, Reply, Request, decode_reply, encode
from kvferry.sidechannel.sockets import Wake, configure, endpoint

logger = logging.getLogger(__name__)

OnReply = Callable[[Reply | None], None]
"""Gets the reply, or None when there was none in time. Called on the client's thread: it must not wait."""

Tick = Callable[[], float | None]

LONGEST_WAIT_S = 1.0


@dataclass(slots=True)
class _Pending:
    address: Address
    deadline: float
    on_reply: OnReply


@dataclass(slots=True)
class _Outgoing:
    address: Address
    body: bytes
    timeout: float
    on_reply: OnReply


class Client:
    """Sends requests and hands back replies. A dead or slow peer delays nobody but its own callers.

    Messages to one address arrive in the order they were sent.

    Args:
        name: of the thread.
        tick: called on the client's thread between messages; returns seconds until it wants to be called again.
    """

    def __init__(self, name: str, tick: Tick | None = None) -> None:
        self._tick = tick or (lambda: None)
        self._outgoing: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()
        self._pending: dict[bytes, _Pending] = {}
        self._peers: dict[Address, zmq.Socket[bytes]] = {}
        self._numbers = itertools.count()
        self._context: zmq.Context[Any] = zmq.Context()
        self._wake = Wake()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def send(self, address: Address, message: Request, timeout: float, on_reply: OnReply) -> None:
        """Send ``message``; ``on_reply`` is called exactly once, within ``timeout`` seconds."""
        if self._closed:
            self._call(on_reply, None)
            return
        self._outgoing.put(_Outgoing(address, encode(message), timeout, on_reply))
        self.wake()

    def wake(self) -> None:
        """Have ``tick`` called soon, from any thread."""
        self._wake.set()

    def close(self) -> None:
        """Stop; callbacks still pending are called with None. Safe to call twice."""
        if self._thread.is_alive():
            self._closed = True
            self._outgoing.put(None)
            self.wake()
            self._thread.join(timeout=5)
        if not self._context.closed:
            self._wake.close()
            self._context.destroy(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake.fileno(), zmq.POLLIN)
        running = True
        while running:
            try:
                for socket, _ in poller.poll(self._wait_ms()):
                    if socket == self._wake.fileno():
                        self._wake.clear()
                    else:
                        self._receive(socket)
                running = self._send_all(poller)
                self._time_out(poller)
            except zmq.ContextTerminated:
                break
            except Exception:
                logger.exception("a KVFerry side-channel client goes on after an error")
        for pending in self._pending.values():
            self._call(pending.on_reply, None)

    def _wait_ms(self) -> int:
        wishes = [LONGEST_WAIT_S]
        wish = self._tick()
        if wish is not None:
            wishes.append(wish)
        if self._pending:
            wishes.append(min(pending.deadline for pending in self._pending.values()) - time.monotonic())
        return int(1000 * max(0.0, min(wishes))) + 1

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        frames = socket.recv_multipart()
        if len(frames) != 2 or frames[0] not in self._pending:
            return  # an answer that came too late, or no answer of ours
        pending = self._pending.pop(frames[0])
        try:
            reply: Reply | None = decode_reply(frames[1])
        except MessageError as error:
            logger.warning("%s:%d answered with what is not KVFerry's: %s", *pending.address, error)
            reply = None
        self._call(pending.on_reply, reply)

    def _send_all(self, poller: zmq.Poller) -> bool:
        while not self._outgoing.empty():
            item = self._outgoing.get()
            if item is None:
                return False
            try:
                number = next(self._numbers).to_bytes(8, "little")
                self._peer(item.address, poller).send_multipart([number, item.body], zmq.NOBLOCK)
            except (zmq.ZMQError, UnicodeError, ValueError) as error:
                logger.warning("cannot send to %s:%d: %s", *item.address, error)
                self._call(item.on_reply, None)
                continue
            self._pending[number] = _Pending(item.address, time.monotonic() + item.timeout, item.on_reply)
        return True

    def _peer(self, address: Address, poller: zmq.Poller) -> zmq.Socket[bytes]:
        if address not in self._peers:
            socket = self._context.socket(zmq.DEALER)
            configure(socket, MAX_REPLY_BYTES)
            try:
                socket.connect(endpoint(*address))
            except BaseException:
                socket.close(linger=0)
                raise
            poller.register(socket, zmq.POLLIN)
            self._peers[address] = socket
        return self._peers[address]

    def _time_out(self, poller: zmq.Poller) -> None:
        now = time.monotonic()
        for number in [number for number, pending in self._pending.items() if pending.deadline <= now]:
            pending = self._pending.pop(number)
            self._forget(pending.address, poller)
            self._call(pending.on_reply, None)

    def _forget(self, address: Address, poller: zmq.Poller) -> None:
        """Drop the connection to a peer that did not answer, with whatever is still queued for it."""
        if any(pending.address == address for pending in self._pending.values()):
            return
        socket = self._peers.pop(address, None)
        if socket is not None:
            poller.unregister(socket)
            socket.close(linger=0)

    @staticmethod
    def _call(on_reply: OnReply, reply: Reply | None) -> None:
        try:
            on_reply(reply)
        except Exception:
            logger.exception("handling a side-channel reply failed")
