"""The routes. What is not listed here is not there: engines have routes that no client may reach."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from importlib import resources

import aiohttp
import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from kvferry.errors import GatewayError
from kvferry.gateway import bodies
from kvferry.gateway.answers import BrokenStreamError, Merge, corrected, corrected_events, part_id
from kvferry.gateway.bodies import ENDPOINTS, Body, Endpoint
from kvferry.gateway.dispatch import Dispatcher, Job, Opened, Strategy
from kvferry.gateway.errors import ApiError, error_body, error_event
from kvferry.gateway.exchange import ClientGoneError, Exchange
from kvferry.gateway.health import Fleet, Instance
from kvferry.gateway.membership import Membership
from kvferry.gateway.metrics import Metrics
from kvferry.gateway.release import Releaser
from kvferry.gateway.settings import SETTINGS_VARIABLE, InstanceSpec, Role, Settings, read_keys, read_seal

logger = logging.getLogger(__name__)

JSON = {"content-type": "application/json"}
EVENTS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
PASSED_THROUGH = (("GET", "/v1/models"), ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/version"))


class Gateway:
    """Everything that lives as long as one worker process.

    Raises:
        GatewayError: a file with keys or the secret cannot be used.
    """

    def __init__(self, settings: Settings, strategy: Strategy | None = None) -> None:
        self.settings = settings
        self.fleet = Fleet(settings, asyncio.get_running_loop().time)
        self.metrics = Metrics(self.fleet)
        self.client_keys = read_keys(settings.api_key_file)
        self.admin_keys = read_keys(settings.admin_key_file)
        self._engine_keys = read_keys(settings.engine_key_file)
        self._releaser = Releaser(read_seal(settings), lambda outcome: self.metrics.releases.labels(outcome).inc())
        self._strategy = strategy
        self._shared = Membership(self.fleet, settings.shared_file)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Knows the instances before it takes a request."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.settings.connect_timeout)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        # A probe connects anew: that an old connection still stands says little, that it was closed says nothing.
        probing = aiohttp.TCPConnector(force_close=True)
        async with (
            aiohttp.ClientSession(
                connector=connector, timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
            ) as self.session,
            aiohttp.ClientSession(connector=probing) as probes,
        ):
            release = self._releaser.release
            self.dispatcher = Dispatcher(self.settings, self.fleet, self.session, self.metrics, release, self._strategy)
            await self.fleet.probe(probes)
            watching = asyncio.create_task(self.fleet.watch(probes, self._shared.load))
            try:
                yield
            finally:
                watching.cancel()
                self._releaser.close()

    def changed(self) -> None:
        """Something was changed through /admin: tell the other worker processes."""
        self._shared.save()

    def authorize(self, headers: Headers, keys: Sequence[bytes]) -> None:
        """Raises ``ApiError``, 401, unless a bearer token is one of ``keys``; without keys anybody may."""
        shown = headers.get("authorization", "").removeprefix("Bearer ").encode()
        good = [hmac.compare_digest(shown, key) for key in keys]
        if keys and not any(good):
            raise ApiError(401, "the Authorization header holds no valid key", headers={"www-authenticate": "Bearer"})

    def engine_headers(self, exchange: Exchange) -> dict[str, str]:
        """For a leg: the gateway's own key, or, where clients need none here, the client's."""
        headers = exchange.leg_headers()
        if self._engine_keys:
            headers["Authorization"] = f"Bearer {self._engine_keys[0].decode()}"
        elif not self.client_keys and "authorization" in exchange.headers:
            headers["Authorization"] = exchange.headers["authorization"]
        return headers


class Generate:
    """The route of one endpoint that generates."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway: Gateway = scope["app"].state.gateway
        exchange = Exchange(scope, receive, send, gateway.metrics)
        with exchange.accounted():
            try:
                gateway.authorize(exchange.headers, gateway.client_keys)
                raw = await exchange.body(gateway.settings.max_body_bytes)
                async with exchange.attended():
                    await self._serve(gateway, exchange, raw)
            except ApiError as error:
                await exchange.refuse(error)
            except ClientGoneError:
                raise
            except Exception:
                if exchange.started:
                    raise  # the connection is broken off, which no client takes for an end
                logger.exception("a request failed inside the gateway")
                await exchange.refuse(ApiError(500, "the gateway failed"))

    async def _serve(self, gateway: Gateway, exchange: Exchange, raw: bytes) -> None:
        if exchange.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(400, "the content type must be application/json")
        body = bodies.parse(raw)
        jobs = self._jobs(gateway, exchange, body)
        merge = Merge(exchange.request_id, max(1, bodies.integer(body.get("n")) or 1)) if len(jobs) > 1 else None
        opened = await _open_all(gateway.dispatcher, jobs)
        with contextlib.ExitStack() as stack:
            for one in opened:
                stack.callback(one.close)
            whole = [corrected(self._endpoint, one.whole, one.cached) for one in opened if one.whole is not None]
            if len(whole) == len(opened):
                await exchange.answer(200, merge.answers(whole) if merge else bodies.encode(whole[0]), JSON)
            elif whole:
                raise ApiError(502, "instances answered in different ways")
            else:
                await self._stream(exchange, opened, merge)

    def _jobs(self, gateway: Gateway, exchange: Exchange, body: Body) -> list[Job]:
        """One for each prompt."""
        endpoint, plain = self._endpoint, bodies.whole_on_decode(self._endpoint, body)
        prompts = [] if plain else bodies.prompts(endpoint, body)
        parts = [{**body, "prompt": prompt} for prompt in prompts] or [body]
        deadline = asyncio.get_running_loop().time() + gateway.settings.deadline
        jobs = []
        for number, part in enumerate(parts):
            headers = gateway.engine_headers(exchange)
            if prompts:
                headers["X-Request-Id"] = part_id(exchange.request_id, number)
            tokens = bodies.prompt_tokens(endpoint, part), bodies.answer_tokens(endpoint, part)
            jobs.append(Job(endpoint, part, headers, deadline, *tokens, bodies.affinity_key(endpoint, part), plain))
        exchange.trails = [job.trail for job in jobs]
        return jobs

    async def _stream(self, exchange: Exchange, opened: Sequence[Opened], merge: Merge | None) -> None:
        await exchange.start(200, EVENTS)
        try:
            if merge is None:
                async for events in opened[0].events():
                    await exchange.piece(corrected_events(self._endpoint, events, opened[0].cached))
            else:
                async for part, events in _together(opened):
                    merged = merge.events(part, corrected_events(self._endpoint, events, opened[part].cached))
                    if merged:
                        await exchange.piece(merged)
                await exchange.piece(merge.end())
        except (BrokenStreamError, msgspec.DecodeError, KeyError) as error:
            exchange.broke()
            await exchange.piece(error_event(str(error), 502, self._endpoint.named_events))
        await exchange.end()


async def _open_all(dispatcher: Dispatcher, jobs: Sequence[Job]) -> list[Opened]:
    """All of them or none: a status is sent when every prompt has its first token, so no prompt can belie it later."""
    if len(jobs) == 1:
        return [await dispatcher.open(jobs[0])]
    tasks = [asyncio.create_task(dispatcher.open(job)) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Opened):
                result.close()
        raise


async def _together(opened: Sequence[Opened]) -> AsyncIterator[tuple[int, bytes]]:
    """The events of several streams as they come, each with the number of its stream.

    Raises:
        BrokenStreamError: one of them did not end as it should.
    """
    arrived: asyncio.Queue[tuple[int, bytes | BrokenStreamError]] = asyncio.Queue(maxsize=len(opened))

    async def take(part: int) -> None:
        try:
            async for events in opened[part].events():
                await arrived.put((part, events))
            await arrived.put((part, b""))
        except BrokenStreamError as error:
            await arrived.put((part, error))

    tasks = [asyncio.create_task(take(part)) for part in range(len(opened))]
    try:
        running = len(tasks)
        while running:
            part, events = await arrived.get()
            if isinstance(events, BrokenStreamError):
                raise events
            if events:
                yield part, events
            else:
                running -= 1
    finally:
        for task in tasks:
            task.cancel()


Handler = Callable[[Request], Awaitable[Response]]


def _gateway(request: Request) -> Gateway:
    return request.app.state.gateway  # type: ignore[no-any-return]


async def _pass_through(request: Request) -> Response:
    """What any instance answers alike."""
    gateway = _gateway(request)
    gateway.authorize(request.headers, gateway.client_keys)
    exchange = Exchange(request.scope, request.receive, _nowhere, gateway.metrics)
    body = await exchange.body(gateway.settings.max_body_bytes)
    headers = gateway.engine_headers(exchange)
    for rank in gateway.fleet.usable(Role.DECODE) + gateway.fleet.usable(Role.PREFILL):
        url = rank.instance.spec.url + request.url.path
        try:
            async with (
                asyncio.timeout(gateway.settings.idle_timeout),
                gateway.session.request(request.method, url, data=body or None, headers=headers) as answer,
            ):
                kind = answer.headers.get("content-type", JSON["content-type"])
                return Response(await answer.read(), answer.status, {"content-type": kind})
        except (aiohttp.ClientError, OSError, TimeoutError):
            continue
    raise ApiError(503, "no instance is available", headers={"retry-after": "1"})


async def _nowhere(_: object) -> None:
    """An exchange that is answered by other means."""


async def _health(_: Request) -> Response:
    return Response(b'{"status":"ok"}', headers=JSON)


async def _ready(request: Request) -> Response:
    """Whether a request can be answered now, in two legs or, where that is allowed, by decode alone."""
    gateway = _gateway(request)
    usable = {role.value: len(gateway.fleet.usable(role)) for role in Role}
    ready = usable[Role.DECODE] and (usable[Role.PREFILL] or gateway.settings.plain_decode)
    return Response(msgspec.json.encode(usable), 200 if ready else 503, JSON)


async def _metrics(request: Request) -> Response:
    return Response(_gateway(request).metrics.text(), headers={"content-type": "text/plain; version=0.0.4"})


async def _openapi(_: Request) -> Response:
    return Response(resources.files("kvferry.gateway").joinpath("openapi.json").read_bytes(), headers=JSON)


def _admin(handler: Callable[[Gateway, bytes], Instance | None]) -> Handler:
    """A route for whoever has an admin key; it answers with all instances."""

    @functools.wraps(handler)
    async def route(request: Request) -> Response:
        gateway = _gateway(request)
        if not gateway.admin_keys:
            raise ApiError(404, "there is no /admin without an admin key")
        gateway.authorize(request.headers, gateway.admin_keys)
        handler(gateway, await request.body())
        if request.method == "POST":
            gateway.changed()
        return Response(
            msgspec.json.encode([_described(one) for one in gateway.fleet.instances.values()]), headers=JSON
        )

    return route


def _described(instance: Instance) -> dict[str, object]:
    ranks = [{"rank": rank.index, "usable": rank.usable, "requests": rank.requests} for rank in instance.ranks]
    state = {"up": instance.up, "draining": instance.draining, "requests": instance.requests}
    return {"url": instance.spec.url, "role": instance.spec.role, **state, "ranks": ranks}


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    url: str


def _named(gateway: Gateway, body: bytes) -> Instance:
    try:
        return gateway.fleet.instances[msgspec.json.decode(body, type=_Named).url.rstrip("/")]
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(400, f'the body must be {{"url": "http://host:port"}}: {error}') from None
    except KeyError:
        raise ApiError(404, "there is no such instance") from None


def _list(_: Gateway, __: bytes) -> None:
    """Only what there is."""


def _add(gateway: Gateway, body: bytes) -> None:
    try:
        asked = msgspec.json.decode(body, type=InstanceSpec)
        gateway.fleet.add(InstanceSpec(InstanceSpec.parse(asked.url, asked.role).url, asked.role, asked.dp))
    except (msgspec.DecodeError, RecursionError, GatewayError) as error:
        raise ApiError(400, f"not an instance: {error}") from None


def _remove(gateway: Gateway, body: bytes) -> None:
    gateway.fleet.remove(_named(gateway, body).spec.url)


def _drain(gateway: Gateway, body: bytes) -> None:
    _named(gateway, body).draining = True


def _resume(gateway: Gateway, body: bytes) -> None:
    _named(gateway, body).draining = False


async def _on_error(_: Request, error: Exception) -> Response:
    if isinstance(error, ApiError):
        return Response(error.body, error.status, error.headers)
    assert isinstance(error, HTTPException)
    return Response(error_body(error.status_code, error.detail), error.status_code, {**JSON, **(error.headers or {})})


def _routes() -> list[BaseRoute]:
    own = [("/health", _health), ("/ready", _ready), ("/metrics", _metrics), ("/openapi.json", _openapi)]
    actions = [("add", _add), ("remove", _remove), ("drain", _drain), ("resume", _resume)]
    return [
        *(Route(endpoint.path, Generate(endpoint), methods=["POST"]) for endpoint in ENDPOINTS),
        *(Route(path, _pass_through, methods=[method]) for method, path in PASSED_THROUGH),
        *(Route(path, handler, methods=["GET"]) for path, handler in own),
        Route("/admin/instances", _admin(_list), methods=["GET"]),
        *(Route(f"/admin/{name}", _admin(action), methods=["POST"]) for name, action in actions),
    ]


def create_app(settings: Settings, strategy: Strategy | None = None) -> Starlette:
    """The gateway as an ASGI application; ``GatewayError`` from its start for files that cannot be used."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.gateway = Gateway(settings, strategy)
        async with app.state.gateway.running():
            yield

    handlers = {ApiError: _on_error, HTTPException: _on_error}
    app = Starlette(routes=_routes(), lifespan=lifespan, exception_handlers=handlers)  # type: ignore[arg-type]
    app.router.redirect_slashes = False
    return app


def from_environment() -> Starlette:
    """For worker processes: the settings are in the environment."""
    return create_app(msgspec.json.decode(os.environ[SETTINGS_VARIABLE], type=Settings))
