"""What the gateway, or vllm-router, adds to a request, against the same two legs sent directly; stand-in engines.

    python benches/gateway_overhead.py                                          capacity: engines that answer at once
    python benches/gateway_overhead.py --service-ms 50 --concurrency 32         what is added, with engines that work
    python benches/gateway_overhead.py --service-ms 2000 --streams 1000         so many streams open at the same time
    python benches/gateway_overhead.py --other before=/a/checkout/src           against the gateway of another checkout

Engines, gateway and router are processes of their own; the load comes from this one. Two legs sent directly by the
same client are the base line, and "added" is the difference to it. Every client sends its next request when the last is
answered. With engines that answer at once, many clients are therefore always more than the machine can serve, and the
times show nothing but its capacity; --service-ms has engines take that long to the first byte, and as long again for
the tokens after it, which is how added latency is to be measured, as long as requests a second stay well below
capacity. --rate has requests come at a fixed rate instead. On a busy machine only rows of one run can be compared with
each other: all subjects are measured in turns, and the turns are repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import psutil
import uvicorn
import uvloop

from kvferry.cluster.commands import router_command
from kvferry.cluster.dispatch import PREFILL_PARAMETERS

PATH = "/v1/chat/completions"
TOKENS = 16
WORDS = "a prompt of some length " * 40
PARAMETERS = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_host": "127.0.0.1", "remote_port": 1}
WHOLE = json.dumps(
    {
        "id": "x",
        "object": "chat.completion",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "word " * TOKENS}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 200, "completion_tokens": TOKENS, "total_tokens": 216},
        "kv_transfer_params": PARAMETERS,
    }
).encode()
CHUNK = b'data: {"id":"x","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"word "}}]}\n\n'
DONE = b"data: [DONE]\n\n"
PLAIN, JSON, EVENTS = ([(b"content-type", kind)] for kind in (b"text/plain", b"application/json", b"text/event-stream"))
METRICS = b'vllm:kv_cache_usage_perc{engine="0"} 0.1\n'
JITTER = 0.2
"""How far times of engines that take time are from what was asked for, at most; else all clients march in step."""
BUSY = 0.7
"""From this part of a core on the load client delays what it measures."""


class Engine:
    """An ASGI application in vLLM's place.

    Args:
        service: seconds to the first byte; a decode leg's tokens take as long again. 0 for an answer at once.
    """

    def __init__(self, prefill: bool, service: float) -> None:
        self._prefill, self._service = prefill, service

    async def __call__(self, scope, receive, send) -> None:
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if scope["method"] == "GET":
            answer = METRICS if scope["path"] == "/metrics" else b"{}"
            await _answer(send, answer, PLAIN)
            return
        await self._work(1.0)
        if json.loads(body).get("stream"):
            await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
            for token in range(TOKENS):
                if token:
                    await self._work(1 / TOKENS)
                await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
            await send({"type": "http.response.body", "body": DONE})
        else:
            await self._work(0.0 if self._prefill else 1.0)
            await _answer(send, WHOLE, JSON)

    async def _work(self, part: float) -> None:
        if self._service and part:
            await asyncio.sleep(part * self._service * random.uniform(1 - JITTER, 1 + JITTER))


async def _answer(send, body: bytes, headers: list) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


def _serve_engine(prefill: bool, port: int, service: float) -> None:
    settings = {"loop": "uvloop", "http": "httptools", "lifespan": "off", "log_level": "error", "access_log": False}
    uvicorn.run(Engine(prefill, service), host="127.0.0.1", port=port, backlog=4096, **settings)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@dataclass
class Times:
    """Seconds of each request: to the first byte of its answer's body, and to the end."""

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    failed: Counter[int | str] = field(default_factory=Counter)
    took: float = 0.0
    cpu: float = 0.0
    load_cpu: float = 0.0


class Connection(asyncio.Protocol):
    """One kept-alive connection of the load client: just as much HTTP as uvicorn and vllm-router answer with, because a
    whole HTTP client would take more of the two or three cores than what is measured.
    """

    def connection_made(self, transport) -> None:
        self._transport = transport
        self._answered: asyncio.Future[None] | None = None

    async def ask(self, request: bytes) -> tuple[int, bytes, float]:
        """Status, or 0 for an answer that was cut; the body, with the marks of chunks if it has them; when it began."""
        self._data, self._start, self._end, self._first = bytearray(), 0, -1, 0.0
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._answered
        whole = self._is_whole()
        return int(self._data[9:12]) if whole else 0, bytes(self._data[self._start :]), self._first

    def data_received(self, data: bytes) -> None:
        self._data += data
        if not self._start:
            at = self._data.find(b"\r\n\r\n")
            if at < 0:
                return
            self._start = at + 4
            _, found, length = bytes(self._data[:at]).lower().partition(b"\r\ncontent-length:")
            self._end = self._start + int(length.partition(b"\r\n")[0]) if found else -1
        if not self._first and len(self._data) > self._start:
            self._first = time.perf_counter()
        if self._is_whole():
            self._finish()

    def _is_whole(self) -> bool:
        if not self._start:
            return False
        return len(self._data) >= self._end >= 0 or (self._end < 0 and self._data.endswith(b"\r\n0\r\n\r\n"))

    def connection_lost(self, _: Exception | None) -> None:
        self._finish()

    def _finish(self) -> None:
        if self._answered and not self._answered.done():
            self._answered.set_result(None)

    @property
    def usable(self) -> bool:
        return not self._transport.is_closing()

    def close(self) -> None:
        self._transport.close()


class Server:
    """A URL, and the connections to it that are not in use."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._idle: list[Connection] = []

    async def ask(self, body: bytes, method: str = "POST", path: str = PATH) -> tuple[int, bytes, float]:
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        connection = self._idle.pop() if self._idle else None
        if connection is None or not connection.usable:
            _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", self.port)
        try:
            return await connection.ask(head.encode() + b"\r\n\r\n" + body)
        finally:
            self._idle.append(connection)

    async def ready(self, path: str) -> None:
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(OSError):
                    if (await self.ask(b"", "GET", path))[0] == 200:
                        return
                await asyncio.sleep(0.1)


Send = Callable[[bool, Times], Awaitable[None]]


def _body(stream: bool, **more: object) -> bytes:
    messages = [{"role": "user", "content": WORDS}]
    return json.dumps({"model": "m", "messages": messages, "stream": stream, "max_tokens": TOKENS, **more}).encode()


def _through(server: Server) -> Send:
    bodies = {stream: _body(stream) for stream in (False, True)}

    async def send(stream: bool, times: Times) -> None:
        started = time.perf_counter()
        _note(times, started, stream, *await server.ask(bodies[stream]))

    return send


def _directly(prefill: Server, decode: Server) -> Send:
    first = _body(False, kv_transfer_params=dict(PREFILL_PARAMETERS))
    starts = {stream: _body(stream)[:-1] + b', "kv_transfer_params": ' for stream in (False, True)}

    async def send(stream: bool, times: Times) -> None:
        started = time.perf_counter()
        _, raw, _ = await prefill.ask(first)
        parameters = json.dumps(json.loads(raw)["kv_transfer_params"]).encode()
        _note(times, started, stream, *await decode.ask(starts[stream] + parameters + b"}"))

    return send


def _note(times: Times, started: float, stream: bool, status: int, body: bytes, first: float) -> None:
    ended = time.perf_counter()
    if status != 200 or (stream and body.count(b"data: ") != TOKENS + 1) or (stream and b"[DONE]" not in body[-40:]):
        times.failed[status if status != 200 else "cut"] += 1
        return
    times.first.append(first - started)
    times.whole.append(ended - started)


async def _load(send: Send, concurrency: int, stream: bool, seconds: float, times: Times, rate: float) -> None:
    """``seconds`` 0: every client sends one request."""
    await send(stream, Times())
    started, cpu = time.perf_counter(), time.process_time()
    until = started + seconds

    async def client() -> None:
        await send(stream, times)
        while time.perf_counter() < until:
            await send(stream, times)

    if rate:
        await _at_rate(rate, until, lambda: send(stream, times))
    else:
        await asyncio.gather(*(client() for _ in range(concurrency)))
    times.took += time.perf_counter() - started
    times.load_cpu += time.process_time() - cpu


async def _at_rate(rate: float, until: float, send: Callable[[], Awaitable[None]]) -> None:
    """Requests at random moments, ``rate`` of them in a second, whether or not others have ended."""
    draw, under_way = random.Random(1), set()
    due = time.perf_counter()
    while due < until:
        due += draw.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        task = asyncio.ensure_future(send())
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    await asyncio.gather(*under_way)


@contextlib.contextmanager
def _running(command: list[str], **environment: str) -> Iterator[psutil.Process]:
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **environment}
    )
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(40)


Subjects = dict[str, tuple[Send, psutil.Process | None]]


@contextlib.asynccontextmanager
async def _subjects(arguments: argparse.Namespace) -> AsyncIterator[Subjects]:
    prefill, decode = Server(_free_port()), Server(_free_port())
    with contextlib.ExitStack() as stack:
        for engine in (prefill, decode):
            settings = (engine is prefill, engine.port, arguments.service_ms / 1e3)
            process = multiprocessing.Process(target=_serve_engine, args=settings, daemon=True)
            process.start()
            stack.callback(process.terminate)
            await engine.ready("/health")
        subjects: Subjects = {"direct": (_directly(prefill, decode), None)}
        main = [sys.executable, "-c", "from kvferry.cli import main; main()", "gateway", "--no-access-log"]
        main += ["--prefill", prefill.url, "--decode", decode.url, "--workers", str(arguments.workers)]
        sources = {"gateway": None, **dict(text.split("=", 1) for text in arguments.other)}
        for name, source in sources.items():
            gateway = Server(_free_port())
            environment = {"PYTHONPATH": source} if source else {}
            process = stack.enter_context(_running([*main, "--port", str(gateway.port)], **environment))
            await gateway.ready("/ready")
            subjects[name] = (_through(gateway), process)
        if shutil.which("vllm-router") and not arguments.no_router:
            router = Server(_free_port())
            command = router_command([prefill.url], [decode.url], router.port, _free_port())
            process = stack.enter_context(_running(command))
            await router.ready("/readiness")
            subjects["vllm-router"] = (_through(router), process)
        yield subjects


def _cpu(process: psutil.Process | None) -> float:
    """Seconds of processor time of a process and its children so far."""
    if process is None:
        return 0.0
    family = [process, *process.children(recursive=True)]
    return sum(sum(one.cpu_times()[:2]) for one in family)


async def _measure(arguments: argparse.Namespace) -> None:
    async with _subjects(arguments) as subjects:
        _head(arguments)
        kinds = [(True, arguments.streams)] if arguments.streams else []
        kinds = kinds or [(stream, at_once) for stream in (False, True) for at_once in arguments.concurrency]
        for stream, at_once in kinds:
            times = {name: Times() for name in subjects}
            seconds = 0.0 if arguments.streams else arguments.seconds / arguments.turns
            for _ in range(arguments.turns):
                for name, (send, process) in subjects.items():
                    before = _cpu(process)
                    await _load(send, at_once, stream, seconds, times[name], arguments.rate)
                    times[name].cpu += _cpu(process) - before
            for name, found in times.items():
                _row(name, stream, at_once, found, times["direct"])
        for name, (_, process) in subjects.items():
            if process is not None:
                family = [process, *process.children(recursive=True)]
                print(f"{name}: {sum(one.memory_info().rss for one in family) / 2**20:.0f} MiB")


def _head(arguments: argparse.Namespace) -> None:
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg()[:2])
    engines = f"engines take {arguments.service_ms:g} ms" if arguments.service_ms else "engines answer at once"
    print(f"{os.cpu_count()} cores, load before {load}; {engines}; gateway workers: {arguments.workers}")
    print(f"{'':29}{'first ms':>16}{'added':>16}{'whole ms':>16}{'added':>16}{'':>8}{'cpu':>8}{'load':>7}")
    columns = "".join(f"{column:>8}" for column in ("p50", "p99") * 4)
    print(f"{'subject':14}{'stream':>7}{'at once':>8}{columns}{'req/s':>8}{'ms/req':>8}{'core':>7}  failures")


def _row(name: str, stream: bool, at_once: int, found: Times, direct: Times) -> None:
    numbers = ""
    for mine, base in ((found.first, direct.first), (found.whole, direct.whole)):
        times, less = _percentiles(mine), _percentiles(base)
        added = [f"{one - other:8.2f}" for one, other in zip(times, less, strict=True)]
        numbers += "".join(f"{one:8.2f}" for one in times) + ("".join(added) if found is not direct else " " * 16)
    count = len(found.whole)
    busy = found.load_cpu / found.took
    costs = f"{count / found.took:8.0f}{1e3 * found.cpu / max(1, count):8.2f}{busy:7.2f}"
    failed = f"  FAILED {dict(found.failed)}" if found.failed else f"{'0 of ' + str(count):>12}"
    late = "  (the load client is the limit)" if busy > BUSY else ""
    print(f"{name:14}{stream!s:>7}{at_once:8}{numbers}{costs}{failed}{late}", flush=True)


def _percentiles(seconds: list[float]) -> list[float]:
    """The 50th and the 99th, in milliseconds."""
    if len(seconds) < 2:
        return [float("nan")] * 2
    found = statistics.quantiles(seconds, n=100)
    return [1e3 * found[49], 1e3 * found[98]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="per subject, concurrency and kind of answer")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second; 0 for one after the other")
    parser.add_argument("--service-ms", type=float, default=0.0, help="what an engine takes to its first byte")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--streams", type=int, default=0, help="so many at once, in each turn one of each client")
    parser.add_argument("--other", action="append", default=[], metavar="NAME=SRC", help="another checkout's sources")
    parser.add_argument("--no-router", action="store_true", help="leave vllm-router out")
    arguments = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    uvloop.run(_measure(arguments))


if __name__ == "__main__":
    main()
