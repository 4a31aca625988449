"""One client's request: reading it, answering it, noticing that its client has gone, and saying what became of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from kvferry.gateway.dispatch import Trail
from kvferry.gateway.errors import ApiError
from kvferry.gateway.metrics import Metrics

access = logging.getLogger("kvferry.access")

REQUEST_ID = re.compile(r"[A-Za-z0-9._\-]{1,128}")
TRACE_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
FOR_ENGINES = ("x-session-id", "x-vllm-priority")
TRACE_HEADERS = ("traceparent", "tracestate", "baggage")
CLIENT_GONE = 499
"""The status in logs and metrics of a request whose client did not wait; nginx made the number usual."""


class ClientGoneError(Exception):
    """There is nobody left to answer."""


class Exchange:
    """A request and its answer.

    Attributes:
        request_id: the client's own where it can be used, for both legs, the log and the answer.
        trails: what became of each of its jobs.
        started: the client has been told a status.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, metrics: Metrics) -> None:
        self.headers = Headers(scope=scope)
        given = self.headers.get("x-request-id", "")
        self.request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        self.trails: list[Trail] = []
        self._line = f"{scope['method']} {scope['path']}"
        self._path = scope["path"]
        self._receive, self._send, self._metrics = receive, send, metrics
        self._status = 0
        self.started = False
        self._broken = False
        self._started = time.perf_counter()
        self._first_s = 0.0

    def leg_headers(self) -> dict[str, str]:
        """What the engines get of the client's headers; what is not named here they never see."""
        kept = {name: self.headers[name] for name in FOR_ENGINES if name in self.headers}
        if TRACE_PARENT.fullmatch(self.headers.get("traceparent", "")):
            kept.update({name: self.headers[name] for name in TRACE_HEADERS if name in self.headers})
        return {**kept, "Content-Type": "application/json", "X-Request-Id": self.request_id}

    async def body(self, limit: int) -> bytes:
        """The client's body.

        Raises:
            ApiError: 413, it is longer than ``limit`` bytes.
            ClientGoneError: it did not come whole.
        """
        parts, size = [], 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise ApiError(413, f"the body is longer than {limit} bytes")
            if not message.get("more_body"):
                return b"".join(parts)

    @contextlib.asynccontextmanager
    async def attended(self) -> AsyncIterator[None]:
        """What runs inside is cancelled as soon as the client goes away.

        Raises:
            ClientGoneError: it did.
        """
        try:
            async with asyncio.timeout(None) as attention:
                watcher = asyncio.create_task(self._watch(attention))
                try:
                    yield
                finally:
                    watcher.cancel()
        except TimeoutError:
            if attention.expired():
                raise ClientGoneError from None
            raise

    async def _watch(self, attention: asyncio.Timeout) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        attention.reschedule(0)  # a moment long past

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """From here on the client knows that there is an answer."""
        self._status, self.started = status, True
        self._first_s = time.perf_counter() - self._started
        raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
        raw.append((b"x-request-id", self.request_id.encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def piece(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """All at once."""
        await self.start(status, {**headers, "content-length": str(len(body))})
        await self._send({"type": "http.response.body", "body": body})

    async def refuse(self, error: ApiError) -> None:
        await self.answer(error.status, error.body, error.headers)

    def broke(self) -> None:
        """The answer ended with an error after its first byte."""
        self._broken = True
        self._metrics.broken.labels(self._path).inc()

    @contextlib.contextmanager
    def accounted(self) -> Iterator[None]:
        """Counts and logs the request when it has ended, however it does."""
        try:
            yield
        except ClientGoneError:
            self._status = CLIENT_GONE
            self._metrics.left.labels(self._path).inc()
        finally:
            whole_s = time.perf_counter() - self._started
            self._metrics.requests.labels(self._path, str(self._status)).inc()
            self._metrics.whole.labels(self._path).observe(whole_s)
            if self._first_s:
                self._metrics.first.labels(self._path).observe(self._first_s)
            self._log(whole_s)

    def _log(self, whole_s: float) -> None:
        if not access.isEnabledFor(logging.INFO):
            return
        legs = " ".join(
            f"prefill={trail.prefill} decode={trail.decode} plain={trail.plain} retries={trail.retries} "
            f"prefill_ms={1e3 * trail.prefill_s:.1f}"
            for trail in self.trails
        )
        access.info(
            "id=%s %s status=%d%s first_ms=%.1f whole_ms=%.1f %s",
            self.request_id,
            self._line,
            self._status,
            " broken" if self._broken else "",
            1e3 * self._first_s,
            1e3 * whole_s,
            legs,
        )
