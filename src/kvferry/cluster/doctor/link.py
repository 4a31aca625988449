"""A link between two hosts: ``kvferry doctor serve`` on one, ``kvferry doctor HOST:PORT`` on the other.

One line of JSON in each direction at a time. Each side has its NIXL agent in a process of its own, so that metadata
which is none ends that process and not the server.
"""

import asyncio
import contextlib
import re
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from kvferry.cluster.child import ANSWER_S, START_S, Child, ucx_log
from kvferry.cluster.doctor.endpoint import LARGEST, SMALLEST, endpoint
from kvferry.cluster.doctor.fabric import Used, read_logs, used
from kvferry.cluster.doctor.findings import Finding, ok, problem, warning
from kvferry.errors import KVFerryError, MessageError, PortInUseError, SpecError, TransferError
from kvferry.protocol.authentication import Seal

VERSION = 1
SIZE = 64 << 20
MOST_BYTES = 1 << 17
MOST_CONNECTIONS = 32
CONNECT_S = 10.0
FIRST_S = 10.0  # until a connection says what it wants
IDLE_S = 120.0  # between two messages: the other side may be measuring meanwhile
SESSION_S = 600.0
PINGS = 20
LOPSIDED = 3.0
"""How much slower one direction may be before that is worth a warning."""
NET, INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")

T = TypeVar("T")
Size = Annotated[int, Meta(ge=SMALLEST, le=LARGEST)]


class Peer(msgspec.Struct, frozen=True):
    """An endpoint's description of itself."""

    metadata: Annotated[str, Meta(max_length=MOST_BYTES // 2)]
    address: Annotated[int, Meta(ge=0, le=1 << 62)]
    size: Size
    fill: Annotated[int, Meta(ge=1, le=255)]


class Hello(msgspec.Struct, frozen=True, tag="hello", tag_field="do", forbid_unknown_fields=True):
    """Starts a session; answered with a ``Peer``."""

    version: int
    size: Size


class Ping(msgspec.Struct, frozen=True, tag="ping", tag_field="do", forbid_unknown_fields=True):
    """Answered at once."""


class Measure(msgspec.Struct, frozen=True, tag="measure", tag_field="do", forbid_unknown_fields=True):
    """Read from that endpoint; answered with a ``Speed``."""

    peer: Peer


class Copy(msgspec.Struct, frozen=True, tag="copy", tag_field="do", forbid_unknown_fields=True):
    """Copy memory; answered with a ``Copied``."""


Message = Hello | Ping | Measure | Copy


class Pong(msgspec.Struct, frozen=True):
    """The answer to ``Ping``."""


class Speed(msgspec.Struct, frozen=True):
    """Of reads from one endpoint."""

    gigabytes_per_s: float
    us_per_descriptor: float


class Copied(msgspec.Struct, frozen=True):
    """Of copies within one process."""

    gigabytes_per_s: float


class Report(msgspec.Struct, frozen=True):
    """One link. ``here`` is where the report is made.

    Attributes:
        to_here, to_there: reads; 1 GB is 1e9 bytes.
        copy_here, copy_there: GB/s with which one process there copies memory: more than that no transfer over shared
            memory can do.
        round_trip_ms: median of a message and its answer.
        over: what the reads to here have taken, by UCX's own account.
        card_gigabytes_per_s: nominal speed of the network cards among these; None where it is not known.
    """

    peer: str
    bytes: int
    to_here: Speed
    to_there: Speed
    copy_here: float
    copy_there: float
    round_trip_ms: float
    over: tuple[Used, ...]
    card_gigabytes_per_s: float | None


class Server:
    """Lets others measure; one session at a time, since two would measure each other."""

    def __init__(self, allow_public: bool = False) -> None:
        self._seal = Seal(allow_public=allow_public)
        self._sessions: set[asyncio.Task[None]] = set()
        self._busy = asyncio.Lock()

    async def run(self, host: str, port: int, on_ready: Callable[[str, int], None]) -> None:
        """Serve until cancelled.

        Raises:
            PortInUseError: the address cannot be listened on.
        """
        try:
            server = await asyncio.start_server(self._connected, host, port, limit=MOST_BYTES)
        except OSError as error:
            raise PortInUseError(f"{host}:{port} cannot be listened on: {error.strerror or error}") from error
        async with server:
            on_ready(*server.sockets[0].getsockname()[:2])
            try:
                await server.serve_forever()
            finally:
                for session in self._sessions:
                    session.cancel()
                await asyncio.gather(*self._sessions, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host = str((writer.get_extra_info("peername") or ("",))[0])
        if len(self._sessions) >= MOST_CONNECTIONS or not self._seal.admits(host.partition("%")[0]):
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task
        self._sessions.add(task)
        try:
            async with asyncio.timeout(SESSION_S):
                await self._serve(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # it went away, or said nothing for too long
        except asyncio.CancelledError:
            pass  # the server ends; asyncio's streams would log a traceback for a handler that ends so
        finally:
            self._sessions.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = await _message(reader, FIRST_S)
            if not isinstance(hello, Hello) or hello.version != VERSION:
                raise MessageError(f"a session begins with a hello of version {VERSION}")
            if self._busy.locked():
                raise TransferError("somebody else is measuring; try again in a minute")
            async with self._busy, endpoint(hello.size) as child:
                await _say(writer, await child.ask("describe", START_S))
                while message := await _message(reader, IDLE_S):
                    await _say(writer, await _answered(child, message))
        except KVFerryError as error:
            await _say(writer, {"error": str(error)})


async def _message(reader: asyncio.StreamReader, deadline_s: float) -> Message | None:
    """The next one; None at the end of the connection.

    Raises:
        MessageError: it is none.
    """
    try:
        async with asyncio.timeout(deadline_s):
            line = await reader.readline()
        return msgspec.json.decode(line, type=Message) if line else None
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        raise MessageError(f"not a message: {error}") from error


async def _answered(child: Child, message: Message) -> dict[str, Any]:
    match message:
        case Ping():
            return {}
        case Measure(peer):
            return await child.ask("measure", peer=msgspec.to_builtins(peer))
        case Copy():
            return await child.ask("copy")
    raise MessageError("a session has only one hello")


async def _say(writer: asyncio.StreamWriter, said: dict[str, Any]) -> None:
    writer.write(msgspec.json.encode(said) + b"\n")
    async with asyncio.timeout(CONNECT_S):
        await writer.drain()


class Session:
    """The side that reports."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def ask(self, message: Message, kind: type[T], deadline_s: float = ANSWER_S + CONNECT_S) -> T:
        """Raises:
        TransferError: the other side could not do it, or went away.
        """
        try:
            async with asyncio.timeout(deadline_s):
                self._writer.write(msgspec.json.encode(message) + b"\n")
                await self._writer.drain()
                line = await self._reader.readline()
            if not line:
                raise TransferError("the other side ended the connection; does it admit this host's address?")
            said = msgspec.json.decode(line, type=dict[str, Any])
            if "error" in said:
                raise TransferError(f"the other side says: {said['error']}")
            return msgspec.convert(said, kind)
        except TimeoutError as error:
            raise TransferError(f"no answer within {deadline_s:.0f} s") from error
        except (OSError, ValueError, msgspec.DecodeError) as error:
            raise TransferError(f"what answers is no `kvferry doctor serve`: {error}") from error

    async def round_trip_ms(self) -> float:
        taken = []
        for _ in range(PINGS):
            begin = time.perf_counter()
            await self.ask(Ping(), Pong)
            taken.append(time.perf_counter() - begin)
        return statistics.median(taken) * 1e3


@contextlib.asynccontextmanager
async def connected(host: str, port: int) -> AsyncIterator[Session]:
    """Raises:
    TransferError: nobody listens there.
    """
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(host, port, limit=MOST_BYTES)
    except (OSError, TimeoutError) as error:
        raise TransferError(f"no connection to {host}:{port}: {error or 'no answer'}") from error
    try:
        yield Session(reader, writer)
    finally:
        writer.close()


async def measure(host: str, port: int, size: int = SIZE) -> Report:
    """Both directions of the link to a ``kvferry doctor serve``, one after the other.

    Raises:
        TransferError: it cannot be measured.
    """
    with tempfile.TemporaryDirectory(prefix="kvferry-doctor-") as directory:
        async with connected(host, port) as session:
            # Only when it is known that somebody answers who can be measured, is anything started here.
            there = await session.ask(Hello(VERSION, size), Peer, START_S)
            async with endpoint(size, ucx_log(Path(directory), "info")) as child:
                here = msgspec.convert(await child.ask("describe", START_S), Peer)
                to_here = msgspec.convert(await child.ask("measure", peer=msgspec.to_builtins(there)), Speed)
                to_there = await session.ask(Measure(here), Speed)
                copy_here = msgspec.convert(await child.ask("copy"), Copied)
                copy_there = await session.ask(Copy(), Copied)
                round_trip = await session.round_trip_ms()
        over = tuple(used(read_logs(Path(directory))))
    return Report(
        f"{host}:{port}",
        size,
        to_here,
        to_there,
        copy_here.gigabytes_per_s,
        copy_there.gigabytes_per_s,
        round_trip,
        over,
        card_speed(over),
    )


def card_speed(over: tuple[Used, ...], net: Path = NET, infiniband: Path = INFINIBAND) -> float | None:
    """GB/s of all network cards that were used together, as they say themselves; None where one does not say."""
    devices = {device for one in over for device in re.findall(r"\b[a-z]\w*/([\w.:-]+)", one.over)}
    speeds = [_card_speed(device, net, infiniband) for device in devices]
    known = [speed for speed in speeds if speed is not None]
    return sum(known) if known and len(known) == len(speeds) else None


def _card_speed(device: str, net: Path, infiniband: Path) -> float | None:
    name, _, port = device.partition(":")
    with contextlib.suppress(OSError, ValueError, IndexError):
        if (infiniband / name).exists():
            # "200 Gb/sec (4X HDR)"
            return float((infiniband / name / "ports" / (port or "1") / "rate").read_text().split()[0]) / 8
        megabits = int((net / name / "speed").read_text())
        return megabits / 8e3 if megabits > 0 else None
    return None


def findings(report: Report) -> list[Finding]:
    """What a report means."""
    here, there = report.to_here, report.to_there
    lines = [
        ok("link to here", _direction(here, report.copy_here, "here", report.card_gigabytes_per_s)),
        ok("link to there", _direction(there, report.copy_there, "there", report.card_gigabytes_per_s)),
        ok("side channel", f"{report.round_trip_ms:.3g} ms for a message and its answer (median of {PINGS})"),
        _path(report.over),
    ]
    slow, quick = sorted((here.gigabytes_per_s, there.gigabytes_per_s))
    if slow * LOPSIDED < quick:
        text = f"one direction is {quick / slow:.1f} times as fast as the other"
        fix = "measure again; then compare UCX_NET_DEVICES, MTU and what else the two hosts are doing"
        lines.append(warning("directions", text, fix))
    return lines


def _direction(speed: Speed, copy: float, where: str, card: float | None) -> str:
    text = (
        f"{speed.gigabytes_per_s:.3g} GB/s, {speed.gigabytes_per_s / copy:.0%} of memory copy {where} ({copy:.3g} GB/s)"
    )
    if card:
        text += f", {speed.gigabytes_per_s / card:.0%} of the card ({card:.3g} GB/s)"
    return f"{text}; {speed.us_per_descriptor:.3g} us per descriptor"


def _path(over: tuple[Used, ...]) -> Finding:
    if not over:
        return warning("link path", "UCX does not say over what", "read the log of a run with UCX_PROTO_INFO=used")
    text = f"reads to here went over {'; '.join(map(str, over))}"
    if any("tcp/" in one.over for one in over):
        fix = "use RDMA between hosts, shared memory within one; UCX_TLS and UCX_NET_DEVICES may be in the way"
        return warning("link path", f"{text}: every byte goes through the kernel", fix)
    return ok("link path", text)


def examine(host: str, port: int, size: int = SIZE) -> tuple[list[Finding], Report | None]:
    """Measure, and say what it means; that it cannot be measured is a problem."""
    try:
        report = asyncio.run(measure(host, port, size))
    except KVFerryError as error:
        fix = "start `kvferry doctor serve` there, open that port and those of UCX between the hosts"
        return [problem("link", str(error), fix)], None
    return findings(report), report


def parse_target(text: str) -> tuple[str, int]:
    """``HOST:PORT``; an IPv6 address stands in brackets.

    Raises:
        SpecError: it is none.
    """
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:/\[\]]+)):(\d{1,5})", text, re.ASCII)
    if match is None or not 1 <= int(match[3]) <= 65535:
        raise SpecError(
            f"{text} is not of the form HOST:PORT, such as 10.0.0.7:4000 (and the only word known is serve)"
        )
    return match[1] or match[2], int(match[3])
