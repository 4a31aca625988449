"""The routes. What is not listed here is not there: engines have routes that no client may reach."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeVar

import aiohttp
import msgspec
from msgspec import Raw
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from kvferry.gateway import admin, bodies
from kvferry.gateway.answers import Merge, part_id
from kvferry.gateway.bodies import ENDPOINTS, Body, Endpoint
from kvferry.gateway.dispatch import BROKEN, BothAtOnce, Dispatcher, Job, Opened, PrefillFirst, Strategy, failure
from kvferry.gateway.errors import ApiError, error_event
from kvferry.gateway.exchange import CLIENT_GONE, Credentials, Exchange
from kvferry.gateway.health import Fleet
from kvferry.gateway.metrics import Metrics
from kvferry.gateway.release import Releaser
from kvferry.gateway.settings import SETTINGS_VARIABLE, Role, Settings, read_seal

JSON = {"content-type": "application/json"}
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
PASSED_THROUGH = (("GET", "/v1/models"), ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/version"))
KEEP_ALIVE_S = 2.0
"""An idle connection to an engine is closed by this side first: vLLM's servers close theirs after 5 s
(``VLLM_HTTP_TIMEOUT_KEEP_ALIVE``), and a leg sent in that moment would count as the engine's failure."""
GARBAGE = 10_000
"""Objects made before the youngest are looked through for garbage; Python's own number is 700."""

T = TypeVar("T")


@contextlib.asynccontextmanager
async def _running(settings: Settings, strategy: Strategy | None, app: Starlette) -> AsyncIterator[None]:
    """The gateway knows its instances before it takes a request.

    Raises:
        GatewayError: a file with keys or the secret cannot be used.
    """
    fleet = Fleet(settings, asyncio.get_running_loop().time)
    metrics = Metrics(fleet)
    app.state.credentials = Credentials(settings)
    seal = read_seal(settings)
    strategy = strategy or (BothAtOnce(seal) if settings.streaming else PrefillFirst())
    releaser = Releaser(seal, lambda outcome: metrics.releases(outcome).inc())
    async with (
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as session,
        # A probe connects anew: that an old connection still stands says little, that it was closed says nothing.
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as probes,
    ):
        app.state.gateway = Dispatcher(settings, fleet, session, metrics, releaser.release, strategy)
        await fleet.probe(probes)
        watching = asyncio.create_task(fleet.watch(probes))
        try:
            yield
        finally:
            watching.cancel()
            releaser.close()


async def together(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All at once and all or none: when one fails, the others are cancelled and its error is raised."""
    if len(works) == 1:
        return [await works[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


@dataclass(frozen=True)
class Generate:
    """The route of one endpoint that generates."""

    endpoint: Endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway: Dispatcher = scope["app"].state.gateway
        exchange = Exchange(scope, receive, send)
        try:
            exchange.authorize(exchange.credentials.clients)
            raw = await exchange.body_within(gateway.settings.max_body_bytes)
            with exchange.resources:
                async with asyncio.timeout(None) as attention:
                    exchange.resources.callback(asyncio.create_task(exchange.watch(attention)).cancel)
                    await self._serve(gateway, exchange, raw)
        except ApiError as error:
            await error.response()(scope, receive, exchange.send)
        except (ClientDisconnect, TimeoutError):  # nothing else lets a time-out come this far
            exchange.status = CLIENT_GONE
        except Exception:
            if not exchange.status:
                await ApiError(500, "the gateway failed").response()(scope, receive, exchange.send)
            raise  # to the log; an answer that has begun is broken off, which no client takes for an end
        finally:
            exchange.account(gateway.metrics)

    async def _serve(self, gateway: Dispatcher, exchange: Exchange, raw: bytes) -> None:
        if exchange.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(400, "the content type must be application/json")
        body = bodies.parse(raw)
        exchange.jobs = self._jobs(exchange, body)
        # A status is sent when every prompt has its first token, so no prompt can belie it later.
        try:
            async with asyncio.timeout(gateway.settings.deadline):
                opened = await together([gateway.open(job) for job in exchange.jobs])
        except TimeoutError:
            raise ApiError(504, f"there was no answer within {gateway.settings.deadline:g} s") from None
        choices = max(1, bodies.integer(body.get("n")) or 1)
        cached = [job.cached for job in exchange.jobs]
        merge = Merge(self.endpoint, exchange.request_id, choices, cached)
        whole = [one.whole for one in opened if one.whole is not None]
        if len(whole) == len(opened):
            cached[:] = [await gateway.cached(job) for job in exchange.jobs]
            await Response(merge.answers(whole), headers=JSON)(exchange.scope, exchange.receive, exchange.send)
        elif whole:
            raise ApiError(502, "instances answered in different ways")
        else:
            await self._stream(gateway, exchange, opened, cached, merge)

    def _jobs(self, exchange: Exchange, body: Body) -> list[Job]:
        """One for each prompt."""
        plain = bodies.whole_on_decode(self.endpoint, body)
        prompts = [] if plain else bodies.prompts(self.endpoint, body)
        parts = {part_id(exchange.request_id, part): body | {"prompt": one} for part, one in enumerate(prompts)}
        return [
            Job(self.endpoint, part, exchange.for_engines(name), exchange.resources, plain)
            for name, part in (parts or {exchange.request_id: body}).items()
        ]

    async def _stream(
        self,
        gateway: Dispatcher,
        exchange: Exchange,
        opened: Sequence[Opened],
        cached: list[Raw | None],
        merge: Merge,
    ) -> None:
        async def pump(part: int) -> None:
            events = opened[part].first
            while events:
                if self.endpoint.cached.encode() in events:
                    cached[part] = await gateway.cached(exchange.jobs[part])
                if passed := merge.events(part, events):
                    await exchange.piece(passed)
                events = await anext(opened[part].rest, b"")

        await exchange.send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        try:
            await together([pump(part) for part in range(len(opened))])
            end = merge.end()
        except (*BROKEN, msgspec.DecodeError, KeyError) as error:
            exchange.broken = True
            end = error_event(failure(error).message, 502, self.endpoint.named_events)
        await exchange.piece(end, more=False)


async def _pass_through(request: Request) -> Response:
    """What any instance answers alike."""
    gateway: Dispatcher = request.app.state.gateway
    exchange = Exchange(request.scope, request.receive, request._send)
    exchange.authorize(exchange.credentials.clients)
    body = await exchange.body_within(gateway.settings.max_body_bytes)
    headers = exchange.for_engines(exchange.request_id)
    timeout = aiohttp.ClientTimeout(gateway.settings.idle_timeout)
    for rank in gateway.fleet.usable(Role.DECODE) + gateway.fleet.usable(Role.PREFILL):
        url = rank.instance.spec.url + request.url.path
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with gateway.session.request(
                request.method, url, data=body or None, headers=headers, timeout=timeout
            ) as answer:
                kind = answer.headers.get("content-type", JSON["content-type"])
                return Response(await answer.read(), answer.status, {"content-type": kind})
    raise ApiError(503, "no instance is available", headers={"retry-after": "1"})


async def _health(_: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _ready(request: Request) -> Response:
    """Whether a request can be answered now, in two legs or, where that is allowed, by decode alone."""
    gateway: Dispatcher = request.app.state.gateway
    usable = {role.value: len(gateway.fleet.usable(role)) for role in Role}
    ready = usable[Role.DECODE] and (usable[Role.PREFILL] or gateway.settings.plain_decode)
    return JSONResponse(usable, 200 if ready else 503)


async def _metrics(request: Request) -> Response:
    return Response(request.app.state.gateway.metrics.text(), headers={"content-type": "text/plain; version=0.0.4"})


async def _openapi(_: Request) -> Response:
    return Response(resources.files("kvferry.gateway").joinpath("openapi.json").read_bytes(), headers=JSON)


async def _admin(action: str, request: Request) -> Response:
    """For whoever has an admin key: does what is asked, and answers with all instances."""
    gateway: Dispatcher = request.app.state.gateway
    exchange = Exchange(request.scope, request.receive, request._send)
    if not exchange.credentials.admins:
        raise ApiError(404, "there is no /admin without an admin key")
    exchange.authorize(exchange.credentials.admins)
    if action != "instances":
        admin.change(gateway.fleet, action, await request.body())
        gateway.fleet.save()
    return JSONResponse(admin.described(gateway.fleet))


async def _on_error(_: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, error.detail, headers=error.headers or {})
    return (error if isinstance(error, ApiError) else ApiError(500, "the gateway failed")).response()


def _routes() -> list[BaseRoute]:
    post = {f"/admin/{name}": functools.partial(_admin, name) for name in admin.ACTIONS}
    get = {"/health": _health, "/ready": _ready, "/metrics": _metrics, "/openapi.json": _openapi}
    return [
        *(Route(endpoint.path, Generate(endpoint), methods=["POST"]) for endpoint in ENDPOINTS),
        *(Route(path, _pass_through, methods=[method]) for method, path in PASSED_THROUGH),
        *(Route(path, handler, methods=["GET"]) for path, handler in get.items()),
        Route("/admin/instances", functools.partial(_admin, "instances"), methods=["GET"]),
        *(Route(path, handler, methods=["POST"]) for path, handler in post.items()),
    ]


def create_app(settings: Settings, strategy: Strategy | None = None) -> Starlette:
    """The gateway as an ASGI application; ``GatewayError`` from its start for files that cannot be used."""
    handlers: Any = {ApiError: _on_error, HTTPException: _on_error, Exception: _on_error}
    lifespan = functools.partial(_running, settings, strategy)
    app = Starlette(routes=_routes(), lifespan=lifespan, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


def from_environment() -> Starlette:
    """For worker processes: the settings are in the environment."""
    # A request makes a few hundred short-lived objects. Looking through all modules for garbage after each second one
    # took a seventh of a worker's time.
    gc.freeze()
    gc.set_threshold(GARBAGE, 20, 20)
    return create_app(msgspec.json.decode(os.environ[SETTINGS_VARIABLE], type=Settings))
