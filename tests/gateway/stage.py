"""A gateway and its stand-in engines in one event loop, and a client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn

from kvferry.gateway.app import create_app
from kvferry.gateway.dispatch import Dispatcher
from kvferry.gateway.settings import InstanceSpec, Role, Settings

from .standin import SECRET, StandIn

DEADLINE_S = 20.0
REQUEST_ID = "a-request"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "m", "prompt": "Once upon a time", "max_tokens": 4},
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
    "/v1/responses": {"model": "m", "input": "hello", "max_output_tokens": 4},
}


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    broken: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of a stream's events."""
        lines = [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


@dataclass
class Stage:
    gateway: Dispatcher
    url: str
    prefill: list[StandIn]
    decode: list[StandIn]
    client: aiohttp.ClientSession
    seen: list[Any] = field(default_factory=list)

    async def post(self, path: str, body: Any, url: str | None = None, **headers: str) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", "X-Request-Id": REQUEST_ID, **headers}
        async with self.client.post((url or self.url) + path, data=data, headers=sent) as answer:
            parts, broken = [], False
            try:
                async for part in answer.content.iter_any():
                    parts.append(part)
            except aiohttp.ClientError:
                broken = True
            found = {name.lower(): value for name, value in answer.headers.items()}
            return Answer(answer.status, found, b"".join(parts), broken)

    async def get(self, path: str, **headers: str) -> Answer:
        async with self.client.get(self.url + path, headers=headers) as answer:
            found = {name.lower(): value for name, value in answer.headers.items()}
            return Answer(answer.status, found, await answer.read())

    @property
    def grants(self) -> int:
        return sum(len(engine.grants) for engine in self.prefill)

    async def settled(self, condition: Callable[[], bool], case: object = "") -> None:
        """Waits until something that was set going has come about."""
        until = asyncio.get_running_loop().time() + DEADLINE_S
        while not condition():
            assert asyncio.get_running_loop().time() < until, f"did not come about: {case}"
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def served(settings: Settings, strategy: Any = None) -> AsyncIterator[tuple[Dispatcher, str]]:
    """A gateway on a port of its own."""
    app = create_app(settings, strategy)
    sock = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="error", lifespan="on", access_log=False, http="httptools")
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[sock])
    assert server.started, "the gateway did not start"
    try:
        yield app.state.gateway, f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        # Not server.shutdown: it waits for a tenth of a second whatever there is to wait for.
        for listening in server.servers:
            listening.close()
        for connection in list(server.server_state.connections):
            connection.shutdown()
        await server.lifespan.shutdown()
        sock.close()


@contextlib.asynccontextmanager
async def stage(
    prefill: int = 1, decode: int = 1, dp: int = 1, strategy: Any = None, **changes: Any
) -> AsyncIterator[Stage]:
    """So many engines of each kind, a gateway, and a client."""
    ledger: dict = {}
    async with contextlib.AsyncExitStack() as stack:
        producers = [await stack.enter_async_context(StandIn("prefill", dp, ledger)) for _ in range(prefill)]
        consumers = [await stack.enter_async_context(StandIn("decode", dp, ledger)) for _ in range(decode)]
        specs = [InstanceSpec(engine.url, Role(engine.role)) for engine in (*producers, *consumers)]
        quick = {
            "backoff": 0.001,
            "probe_interval": 0.05,
            "probe_timeout": 20.0,
            "retry_ratio": 10.0,
            "breaker_failures": 1000,
        }
        secret = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "secret"
        secret.write_bytes(SECRET)
        settings = Settings(**{"instances": tuple(specs), "secret_file": str(secret), **quick, **changes})
        gateway, url = await stack.enter_async_context(served(settings, strategy))
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
        client = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        yield Stage(gateway, url, producers, consumers, client)


def run(scenario: Awaitable[Any]) -> Any:
    return asyncio.run(scenario)  # type: ignore[arg-type]


def body_of(path: str = "/v1/completions", stream: bool = False, **changes: Any) -> dict[str, Any]:
    """A good body for a route."""
    return {**BODIES[path], **({"stream": True} if stream else {}), **changes}


def key_file(directory: Path, text: str = "admin") -> str:
    """Its name; the keys are the lines of ``text``."""
    file = directory / text.split()[0]
    file.write_text(text)
    return str(file)
