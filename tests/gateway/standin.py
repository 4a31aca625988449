"""A stand-in for a vLLM API server: its answers have vLLM's shapes (shapes.py), and it fails where it is told to.

It speaks HTTP over plain asyncio streams, so that it can break off anywhere. As prefill it holds real grants and
answers the real side channel; as decode it claims and acknowledges them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import zlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvferry.protocol.authentication import Seal
from kvferry.protocol.grants import Grants
from kvferry.protocol.identity import draw, token_identity
from kvferry.protocol.messages import PARAMS_KEY, Ack, Claim, Granted, Offer, Release, Transfer, Waiting, encode
from kvferry.sidechannel.server import Listener

from .shapes import SHAPES, Shape

SECRET = b"a secret of the tests"
SEAL = Seal(SECRET)
PATIENCE_S = 0.5
"""How long decode waits for a prefill that never comes."""

LONG = " and to say much" * 100_000
"""More than comes in one piece."""

FAULTS = (
    "refuse",  # nothing listens
    "400",
    "500",
    "503",  # with Retry-After
    "hang",  # until the other side goes away
    "close",  # before the first byte
    "close after head",
    "half",  # break off in the middle of the answer
    "junk",  # 200 and no JSON
    "error first",  # 200 and a stream whose first event is an error
    "no parameters",  # of prefill: it answers and holds nothing
)


def error(status: int, message: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": "TestError", "param": None, "code": status}}).encode()


@dataclass
class Seen:
    """A request that arrived."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    raw: bytes


@dataclass
class StandIn:
    """Started and stopped with ``async with``.

    Attributes:
        faults: one for each request to come that generates; None for a good answer.
        tokens_before_half: streamed before it breaks off.
        gate: where it is set, a good answer waits for it.
        late: where it is set, an answer that is no stream is computed and then waits for it.
        seen: what arrived and generates.
        left: how many requests were given up by the other side before they were answered.
        hanging: is set while a request hangs.
    """

    role: str = "plain"
    dp: int = 1
    ledger: dict[tuple[str, int], StandIn] = field(default_factory=dict)
    faults: deque[str | None] = field(default_factory=deque)
    gate: asyncio.Event | None = None
    late: asyncio.Event | None = None
    seen: list[Seen] = field(default_factory=list)
    left: int = 0
    fetched: int = 0
    healthy: bool = True
    extra_metrics: str = ""
    usage: float = 0.0
    max_tokens_default: int = 3
    hanging: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    counts: Counter[str] = field(default_factory=Counter)
    port: int = 0

    async def __aenter__(self) -> StandIn:
        self.incarnation = draw()
        self.grants = Grants(self.incarnation, 60.0, asyncio.get_running_loop().time)
        self._serving: dict[asyncio.Task, socket.socket] = {}
        self._listener = None
        if self.role == "prefill":
            self._listener = Listener("127.0.0.1", 0, self._answer, lambda: None, seal=SEAL)
            self.ledger["127.0.0.1", self._listener.port] = self
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shut()
        if self._listener:
            self._listener.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def open(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", self.port), backlog=4096)
        self._socket.setblocking(False)
        self.port = self._socket.getsockname()[1]
        self.listening = True
        asyncio.get_running_loop().add_reader(self._socket, self._accept)

    async def shut(self) -> None:
        """As when the process dies."""
        if not self.listening:
            return
        self.listening = False
        asyncio.get_running_loop().remove_reader(self._socket)
        serving = dict(self._serving)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        for sock in (self._socket, *serving.values()):
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            sock, _ = self._socket.accept()
            task = asyncio.create_task(self._serve(sock))
            self._serving[task] = sock
            task.add_done_callback(self._serving.pop)

    async def restart(self) -> None:
        await self.shut()
        self.incarnation = draw()
        self.grants = Grants(self.incarnation, 60.0, asyncio.get_running_loop().time)
        await self.open()

    def _answer(self, message: Any, respond: Callable[[bytes], object]) -> bytes | None:
        reply = self.grants.answer(message, lambda reply: respond(encode(reply)))
        return None if reply is None else encode(reply)

    async def _serve(self, sock: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 22)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                method, path, _ = head[0].split(" ")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                answering = asyncio.create_task(self._respond(method, path, headers, raw, writer))
                leaving = asyncio.create_task(reader.read(1))
                try:
                    await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
                except asyncio.CancelledError:
                    answering.cancel()
                    raise
                if not answering.done():
                    answering.cancel()
                    self.left += 1
                    self.gone.set()
                    return
                leaving.cancel()
                await asyncio.wait({leaving})
                if not answering.result():
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    async def _respond(
        self, method: str, path: str, headers: dict[str, str], raw: bytes, writer: asyncio.StreamWriter
    ) -> bool:
        """Whether the connection can be used again."""
        if path == "/health":
            return await _send(writer, 200 if self.healthy else 503, b"")
        if path == "/metrics":
            return await _send(writer, 200, self.metrics().encode(), "text/plain")
        if path == "/v1/models":
            return await _send(writer, 200, b'{"object":"list","data":[{"id":"model","object":"model"}]}')
        if path == "/version":
            return await _send(writer, 200, b'{"version":"0.0"}')
        if path in ("/tokenize", "/detokenize"):
            return await _send(writer, 200, b'{"count":1,"tokens":[1],"max_model_len":9}')
        if path not in SHAPES:
            self.counts[path] += 1
            return await _send(writer, 404, error(404, "no such route"))
        body = json.loads(raw)
        self.seen.append(Seen(path, headers, body, raw))
        return await self._generate(path, headers, body, writer)

    def metrics(self) -> str:
        lines = [f'vllm:kv_cache_usage_perc{{engine="{rank}",model_name="m"}} {self.usage}' for rank in range(self.dp)]
        lines.append('vllm:cache_config_info{engine="0",kv_cache_size_tokens="16000"} 1.0')
        if self._listener is not None:
            at = f"{self.incarnation}@127.0.0.1:{self._listener.port}"
            lines += [f'kvferry:side_channel_info{{engine="{rank}",at="{at}"}} 1.0' for rank in range(self.dp)]
        lines.append(f"process_start_time_seconds {zlib.crc32(self.incarnation.encode())}.0")
        return "\n".join(lines) + "\n" + self.extra_metrics

    async def _generate(self, path: str, headers: dict[str, str], body: dict, writer: asyncio.StreamWriter) -> bool:
        self._open(body)
        try:
            return await self._answer_request(path, headers, body, writer)
        finally:
            self._close(body)

    async def _answer_request(
        self, path: str, headers: dict[str, str], body: dict, writer: asyncio.StreamWriter
    ) -> bool:
        fault = self.faults.popleft() if self.faults else None
        if fault and fault.split()[-1].isdigit():
            status = int(fault.split()[-1])
            extra = {"Retry-After": "7"} if status in (429, 503) else {}
            said = f"told to answer {status}" + (LONG if fault.startswith("long") else "")
            return await _send(writer, status, error(status, said), extra=extra)
        if fault in ("hang", "close", "refuse"):
            if fault == "hang":
                self.hanging.set()
                await asyncio.Event().wait()
            return False
        if self.gate is not None:
            self.hanging.set()
            await self.gate.wait()
        if fault == "close after head":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n")
            await writer.drain()
            return False
        if fault == "junk":
            return await _send(writer, 200, b'{"choices": [')
        try:
            shape = SHAPES[path](self, headers, body, await self._fetch(body))
        except (KeyError, TypeError, ValueError):
            return await _send(writer, 400, error(400, "not a request"))
        if not body.get("stream"):
            # What breaks off in the middle of its answer has died, and its grants with it.
            answer = json.dumps(shape.whole(hold=fault not in ("no parameters", "half"))).encode()
            if fault == "half":
                writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(answer)}\r\n\r\n".encode() + answer[:20])
                await writer.drain()
                return False
            if self.late is not None:
                await self.late.wait()
            return await _send(writer, 200, answer)
        return await self._stream(shape, fault, writer)

    async def _stream(self, shape: Shape, fault: str | None, writer: asyncio.StreamWriter) -> bool:
        kind = "text/event-stream; charset=utf-8"
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        events = list(shape.events())
        if fault == "error first":
            events = [b"data: " + error(500, "the load failed") + b"\n\n", b"data: [DONE]\n\n"]
        for number, event in enumerate(events):
            if fault == "half" and number == len(events) // 2:
                await writer.drain()
                return False
            if fault == "hang between" and number == 1:
                self.hanging.set()
                await asyncio.Event().wait()
            writer.write(b"%x\r\n%s\r\n" % (len(event), event))
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    def _open(self, body: dict) -> None:
        """A request arrived: where it says so, its prompt can be claimed from now on."""
        parameters = body.get("kv_transfer_params") or {}
        wanted = self.role == "prefill" and parameters.get("do_remote_decode") is True
        transfer = Transfer.from_params(parameters) if wanted else None
        if transfer is not None:
            self.grants.open(transfer.name, transfer, *_identity(body))

    def _close(self, body: dict) -> None:
        transfer = (body.get("kv_transfer_params") or {}).get(PARAMS_KEY)
        if self.role == "prefill" and transfer:
            self.grants.close(transfer["name"])

    def hold(self, body: dict) -> dict | None:
        """Parameters of a new grant, where the request asks for one."""
        parameters = body.get("kv_transfer_params") or {}
        if self._listener is None or parameters.get("do_remote_decode") is not True:
            return None
        transfer = Transfer.from_params(parameters)
        grant = self.grants.offer(transfer.name if transfer else draw(), [[1]], *_identity(body))
        names = (grant.name, self.incarnation, grant.nonce)
        offer = Offer("127.0.0.1", self._listener.port, "e", *names, grant.tokens, grant.token_hash)
        return offer.to_params(SEAL)

    async def _fetch(self, body: dict) -> bool:
        """Whether what the parameters name was read; of a prefill that goes on, when it has ended."""
        parameters = body.get("kv_transfer_params") or {}
        if self.role != "decode" or not parameters.get("do_remote_prefill"):
            return False
        offer = Offer.from_params(parameters, SEAL)
        grants = self.ledger[offer.address].grants
        claim, identity = draw(), _identity(body)
        names = (offer.incarnation, offer.request, offer.nonce, claim, self.incarnation)
        giving_up = Release(offer.incarnation, offer.request, offer.nonce, claim)
        try:
            claiming = Claim(*names, ["w"], *identity, ahead=offer.tokens is None)
            until = asyncio.get_running_loop().time() + PATIENCE_S
            while isinstance(held := self.ledger[offer.address].grants.answer(claiming), Waiting):
                if not held.known and asyncio.get_running_loop().time() > until:
                    self.ledger[offer.address].grants.answer(giving_up)
                    return False
                await asyncio.sleep(0.002)
            if not isinstance(held, Granted):
                return False
            grants.answer(Ack(offer.incarnation, offer.request, claim, "w"))
            self.fetched += 1
            return True
        except asyncio.CancelledError:
            self.ledger[offer.address].grants.answer(giving_up)
            raise


def _identity(body: dict) -> tuple[int, str]:
    """Number and hash of the tokens of a prompt."""
    prompt = [body.get(key) for key in ("prompt", "messages", "input")]
    return len(json.dumps(prompt)), token_identity(list(json.dumps(prompt).encode()))


async def _send(
    writer: asyncio.StreamWriter, status: int, body: bytes, kind: str = "application/json", extra: dict | None = None
) -> bool:
    lines = {"content-type": kind, "content-length": str(len(body)), **(extra or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    writer.write(f"HTTP/1.1 {status} X\r\n{head}\r\n".encode() + body)
    await writer.drain()
    return True
