"""A producer's listener: one ROUTER socket, one thread, no message that can end it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import zmq

from kvferry.errors import MessageError, SideChannelError
from kvferry.protocol.messages import MAX_REQUEST_BYTES, Request, decode_request
from kvferry.sidechannel.sockets import Wake, configure, endpoint

logger = logging.getLogger(__name__)

Answer = Callable[[Request], bytes]
"""Gives the encoded reply to a message."""

Tick = Callable[[], float | None]
"""Called between messages; returns seconds until it wants to be called again, None for no wish."""

LONGEST_WAIT_S = 1.0


class Listener:
    """Binds at once, answers from a thread of its own until ``close``.

    Args:
        host: address to bind.
        port: 0 lets the system choose; ``port`` tells what was bound.
        answer, tick: called on the listener's thread.

    Raises:
        SideChannelError: the address cannot be bound.
    """

    def __init__(self, host: str, port: int, answer: Answer, tick: Tick) -> None:
        self._answer = answer
        self._tick = tick
        self._ignored = 0
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        configure(self._socket, MAX_REQUEST_BYTES)
        try:
            self._socket.bind(endpoint(host, port or "*"))
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise SideChannelError(
                f"cannot bind the KVFerry side channel to {host}:{port}: {error}. Set another side_channel_port or "
                f"side_channel_host in kv_connector_extra_config; without a port the system chooses a free one"
            ) from error
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._wake = Wake()
        self._thread = threading.Thread(target=self._run, name="kvferry-listener", daemon=True)
        self._thread.start()

    @property
    def ignored(self) -> int:
        """Messages that were not of this protocol, since the start."""
        return self._ignored

    def close(self) -> None:
        """Stop answering and give the port back. Safe to call twice."""
        if self._thread.is_alive():
            self._wake.set()
            self._thread.join(timeout=5)
        if not self._context.closed:
            self._wake.close()
            self._context.destroy(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake.fileno(), zmq.POLLIN)
        while True:
            try:
                ready = dict(poller.poll(self._wait_ms()))
                if self._wake.fileno() in ready:
                    return
                if self._socket in ready:
                    self._serve()
            except zmq.ContextTerminated:
                return
            except Exception:
                # Whatever a peer sent or a handler did, the next message is answered.
                logger.exception("the KVFerry listener goes on after an error")

    def _wait_ms(self) -> int:
        wish = self._tick()
        return int(1000 * min(LONGEST_WAIT_S, max(0.0, LONGEST_WAIT_S if wish is None else wish))) + 1

    def _serve(self) -> None:
        frames = self._socket.recv_multipart()
        if len(frames) != 3:
            self._ignore(f"{len(frames)} frames instead of 3")
            return
        peer, number, body = frames
        try:
            message = decode_request(body)
        except MessageError as error:
            self._ignore(str(error))
            return
        self._socket.send_multipart([peer, number, self._answer(message)])

    def _ignore(self, why: str) -> None:
        self._ignored += 1
        if self._ignored == 1:
            logger.warning("ignoring a message that is not KVFerry's (further ones are only counted): %s", why)
