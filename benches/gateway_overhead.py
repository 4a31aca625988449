"""What the gateway, or vllm-router, adds to a request, against the same two legs sent directly; stand-in engines.

    python benches/gateway_overhead.py [--seconds 3] [--workers 1] [--concurrency 1 32 256]

Engines, gateway and router are processes of their own; the load comes from this one. Two legs sent directly by the
same client are the base line. On a busy machine only rows of one run can be compared with each other: all subjects are
measured in turns, and the turns are repeated. Every client sends its next request when the last is answered, so with
many of them the times show capacity; --rate has requests come at a fixed rate instead, which shows what is added.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import aiohttp
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
PLAIN, JSON, EVENTS = ([(b"content-type", kind)] for kind in (b"text/plain", b"application/json", b"text/event-stream"))
METRICS = b'vllm:kv_cache_usage_perc{engine="0"} 0.1\n'


async def _engine(scope, receive, send) -> None:
    """Answers at once: what is measured is everything else."""
    if scope["type"] != "http":
        return
    body = b""
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    if scope["method"] == "GET":
        answer = METRICS if scope["path"] == "/metrics" else b"{}"
        await _answer(send, answer, PLAIN)
    elif json.loads(body).get("stream"):
        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        for _ in range(TOKENS):
            await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
    else:
        await _answer(send, WHOLE, JSON)


async def _answer(send, body: bytes, headers: list) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


def _serve_engine(port: int) -> None:
    settings = {"loop": "uvloop", "http": "httptools", "lifespan": "off", "log_level": "error", "access_log": False}
    uvicorn.run(_engine, host="127.0.0.1", port=port, backlog=4096, **settings)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@dataclass
class Times:
    """Seconds of each request: to the first byte, and to the end."""

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    failed: Counter[int] = field(default_factory=Counter)
    took: float = 0.0


Send = Callable[[aiohttp.ClientSession, bool, Times], Awaitable[None]]


async def _post(session: aiohttp.ClientSession, url: str, body: bytes) -> tuple[int, bytes, float]:
    async with session.post(url + PATH, data=body, headers={"Content-Type": "application/json"}) as answer:
        first = await answer.content.readany()
        at = time.perf_counter()
        return answer.status, first + await answer.content.read(), at


def _body(stream: bool, **more: object) -> bytes:
    messages = [{"role": "user", "content": WORDS}]
    return json.dumps({"model": "m", "messages": messages, "stream": stream, "max_tokens": TOKENS, **more}).encode()


def _through(url: str) -> Send:
    async def send(session: aiohttp.ClientSession, stream: bool, times: Times) -> None:
        started = time.perf_counter()
        status, body, first = await _post(session, url, _body(stream))
        cut = status == 200 and stream and not body.endswith(b"[DONE]\n\n")
        _note(times, started, first, 0 if cut else status)

    return send


def _directly(prefill: str, decode: str) -> Send:
    async def send(session: aiohttp.ClientSession, stream: bool, times: Times) -> None:
        started = time.perf_counter()
        _, raw, _ = await _post(session, prefill, _body(False, kv_transfer_params=dict(PREFILL_PARAMETERS)))
        parameters = json.loads(raw)["kv_transfer_params"]
        status, _, first = await _post(session, decode, _body(stream, kv_transfer_params=parameters))
        _note(times, started, first, status)

    return send


def _note(times: Times, started: float, first: float, status: int) -> None:
    """Status 0 is a stream that was cut."""
    times.first.append(first - started)
    times.whole.append(time.perf_counter() - started)
    if status != 200:
        times.failed[status] += 1


async def _load(send: Send, concurrency: int, stream: bool, seconds: float, times: Times, rate: float) -> None:
    until = time.perf_counter() + seconds
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await send(session, stream, Times())

        async def client() -> None:
            while time.perf_counter() < until:
                await send(session, stream, times)

        started = time.perf_counter()
        if rate:
            await _at_rate(rate, until, lambda: send(session, stream, times))
        else:
            await asyncio.gather(*(client() for _ in range(concurrency)))
        times.took += time.perf_counter() - started


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
def _running(command: list[str]) -> Iterator[psutil.Process]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(20)


async def _ready(url: str, path: str) -> None:
    async with asyncio.timeout(60), aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url + path) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def _subjects(workers: int) -> AsyncIterator[dict[str, tuple[Send, psutil.Process | None]]]:
    ports = [_free_port() for _ in range(5)]
    engines = [multiprocessing.Process(target=_serve_engine, args=(port,), daemon=True) for port in ports[:2]]
    for engine in engines:
        engine.start()
    prefill, decode, gateway, router = (f"http://127.0.0.1:{port}" for port in ports[:4])
    with contextlib.ExitStack() as stack:
        for engine in engines:
            stack.callback(engine.terminate)
        for url in (prefill, decode):
            await _ready(url, "/health")
        subjects: dict[str, tuple[Send, psutil.Process | None]] = {"direct": (_directly(prefill, decode), None)}
        main = [sys.executable, "-c", "from kvferry.cli import main; main()", "gateway", "--no-access-log"]
        legs = ["--prefill", prefill, "--decode", decode]
        process = stack.enter_context(_running([*main, *legs, "--port", str(ports[2]), "--workers", str(workers)]))
        await _ready(gateway, "/ready")
        subjects["gateway"] = (_through(gateway), process)
        if shutil.which("vllm-router"):
            process = stack.enter_context(_running(router_command([prefill], [decode], ports[3], ports[4])))
            await _ready(router, "/readiness")
            subjects["vllm-router"] = (_through(router), process)
        yield subjects


def _cpu(process: psutil.Process | None) -> float:
    """Seconds of processor time of a process and its children so far."""
    if process is None:
        return 0.0
    family = [process, *process.children(recursive=True)]
    return sum(sum(one.cpu_times()[:2]) for one in family)


def _percentile(values: list[float], part: float) -> float:
    return statistics.quantiles(values, n=100)[int(part * 100) - 1] * 1e3


async def _measure(arguments: argparse.Namespace) -> None:
    async with _subjects(arguments.workers) as subjects:
        print(f"{'':34}{'first byte ms':>16}{'whole ms':>18}{'':>9}{'cpu':>9}")
        columns = ("p50", "p99", "p50", "p99", "req/s", "ms/req")
        print(f"{'subject':14}{'stream':>8}{'at once':>9}" + "".join(f"{column:>9}" for column in columns))
        for stream in (False, True):
            for concurrency in arguments.concurrency:
                times = {name: Times() for name in subjects}
                cpu = dict.fromkeys(subjects, 0.0)
                for _ in range(arguments.turns):
                    for name, (send, process) in subjects.items():
                        before = _cpu(process)
                        seconds = arguments.seconds / arguments.turns
                        await _load(send, concurrency, stream, seconds, times[name], arguments.rate)
                        cpu[name] += _cpu(process) - before
                for name, found in times.items():
                    _row(name, stream, concurrency, found, cpu[name])
        for name, (_, process) in subjects.items():
            if process is not None:
                family = [process, *process.children(recursive=True)]
                print(f"{name}: {sum(one.memory_info().rss for one in family) / 2**20:.0f} MiB")


def _row(name: str, stream: bool, concurrency: int, found: Times, cpu: float) -> None:
    count = len(found.whole)
    numbers = [_percentile(values, part) for values in (found.first, found.whole) for part in (0.5, 0.99)]
    columns = "".join(f"{number:9.2f}" for number in numbers)
    rate, each = count / found.took, 1e3 * cpu / count
    failed = f"  FAILED {dict(found.failed)}" if found.failed else ""
    print(f"{name:14}{stream!s:>8}{concurrency:9}{columns}{rate:9.0f}{each:9.2f}{failed}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="per subject, concurrency and kind of answer")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second; 0 for one after the other")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32, 256])
    uvloop.run(_measure(parser.parse_args()))


if __name__ == "__main__":
    main()
