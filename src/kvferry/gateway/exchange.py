"""One client's request: reading it, answering it, noticing that its client has gone, and saying what became of it."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence

from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from kvferry.gateway.dispatch import Job
from kvferry.gateway.errors import ApiError
from kvferry.gateway.metrics import Metrics
from kvferry.gateway.settings import Settings, read_keys

access = logging.getLogger("kvferry.access")

REQUEST_ID = re.compile(r"[A-Za-z0-9._\-]{1,128}")
TRACE_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
FOR_ENGINES = ("x-session-id", "x-vllm-priority")
ENGINE_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
TRACE_HEADERS = ("traceparent", "tracestate", "baggage")
CLIENT_GONE = 499
"""The status in logs and metrics of a request whose client did not wait; nginx made the number usual."""


class Credentials:
    """What clients and administrators must show here, one of them, and the one that engines are shown."""

    def __init__(self, settings: Settings) -> None:
        self.clients = read_keys(settings.api_key_file)
        self.admins = read_keys(settings.admin_key_file)
        self.engine = read_keys(settings.engine_key_file)[:1]


class Exchange(Request):
    """A request and its answer.

    Attributes:
        credentials: of this gateway.
        request_id: the client's own where it can be used, for both legs, the log and the answer.
        jobs: what the legs are sent for.
        resources: closed when it has ended.
        status: what the client was told; 0 until then.
        broken: the answer ended with an error after its first byte.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(scope, receive, send)
        given = self.headers.get("x-request-id", "")
        self.credentials: Credentials = scope["app"].state.credentials
        self.request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        self.jobs: list[Job] = []
        self.resources = contextlib.ExitStack()
        self.status, self.broken = 0, False
        self._started, self._first_s = time.perf_counter(), 0.0

    def authorize(self, keys: Sequence[bytes]) -> None:
        """Raises ``ApiError``, 401, unless a bearer token is one of ``keys``; without keys anybody may."""
        shown = self.headers.get("authorization", "").removeprefix("Bearer ").encode()
        good = [hmac.compare_digest(shown, key) for key in keys]
        if keys and not any(good):
            raise ApiError(401, "the Authorization header holds no valid key", headers={"www-authenticate": "Bearer"})

    def for_engines(self, request_id: str) -> dict[str, str]:
        """What engines get of the client's headers; what is not named they never see. The key is the gateway's own or,
        where clients need none here, the client's.
        """
        names: tuple[str, ...] = FOR_ENGINES if self.credentials.clients else (*FOR_ENGINES, "authorization")
        if TRACE_PARENT.fullmatch(self.headers.get("traceparent", "")):
            names += TRACE_HEADERS
        sent = {name: self.headers[name] for name in names if name in self.headers}
        for key in self.credentials.engine:
            sent["authorization"] = f"Bearer {key.decode()}"
        return {**sent, **ENGINE_HEADERS, "X-Request-Id": request_id}

    async def body_within(self, limit: int) -> bytes:
        """The client's body.

        Raises:
            ApiError: 413, it is longer than ``limit`` bytes.
            ClientDisconnect: it did not come whole.
        """
        body = bytearray()
        async for piece in self.stream():
            body += piece
            if len(body) > limit:
                raise ApiError(413, f"the body is longer than {limit} bytes")
        return bytes(body)

    async def watch(self, attention: asyncio.Timeout) -> None:
        """Lets the time of ``attention`` run out as soon as the client goes away."""
        while (await self.receive())["type"] != "http.disconnect":
            pass
        attention.reschedule(0)  # a moment long past

    async def send(self, message: Message) -> None:
        """To the client, who gets the request id with the status."""
        if message["type"] == "http.response.start":
            self.status, self._first_s = message["status"], time.perf_counter() - self._started
            message["headers"] = [*message["headers"], (b"x-request-id", self.request_id.encode())]
        await self._send(message)

    async def piece(self, body: bytes, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    def account(self, metrics: Metrics) -> None:
        """Counts and logs the request when it has ended, however it did."""
        whole_s, path = time.perf_counter() - self._started, self.scope["path"]
        metrics.requests(path, str(self.status)).inc()
        metrics.whole(path).observe(whole_s)
        if self._first_s:
            metrics.first(path).observe(self._first_s)
        if self.status == CLIENT_GONE:
            metrics.left(path).inc()
        if self.broken:
            metrics.broken(path).inc()
        if access.isEnabledFor(logging.INFO):
            status = f"status={self.status}{' broken' if self.broken else ''}"
            times = f"first_ms={1e3 * self._first_s:.1f} whole_ms={1e3 * whole_s:.1f}"
            jobs = " ".join(map(str, self.jobs))
            access.info("id=%s %s %s %s %s %s", self.request_id, self.method, path, status, times, jobs)
