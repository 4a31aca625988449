"""A link, measured for real between processes over the loopback interface, and whatever else may connect or answer."""

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from kvferry.cluster.doctor import link
from kvferry.cluster.doctor.endpoint import endpoint
from kvferry.cluster.doctor.fabric import Used
from kvferry.cluster.doctor.findings import Level
from kvferry.cluster.doctor.link import Report, Speed
from kvferry.errors import PortInUseError, SpecError, TransferError

SIZE = 1 << 20
DEADLINE_S = 60.0
LOOPBACK = "127.0.0.1"


class Serve:
    """A ``kvferry doctor serve`` in a process of its own."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "kvferry", "doctor", "serve", "--host", LOOPBACK]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert "kvferry doctor 127.0.0.1:" in line
        self.port = int(line.rpartition(":")[2])

    def end(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(DEADLINE_S)
        assert self.process.stdout
        self.process.stdout.close()
        return code

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    server = Serve()
    yield server
    server.end()


class Connection:
    """A client that says what it likes."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection((LOOPBACK, port), DEADLINE_S)
        self._stream = self._socket.makefile("rb")

    def send(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            self._socket.sendall(data)

    def line(self) -> bytes:
        """The next one; none where the other side has ended the connection."""
        try:
            return self._stream.readline()
        except ConnectionError:
            return b""

    def ask(self, **message: Any) -> dict[str, Any]:
        self.send(json.dumps(message).encode() + b"\n")
        return json.loads(self.line() or b'{"error": "ended"}')

    def close(self) -> None:
        self._stream.close()
        self._socket.close()


@pytest.fixture
def connect(serve: Serve) -> Iterator[Callable[[], Connection]]:
    made: list[Connection] = []

    def make() -> Connection:
        made.append(Connection(serve.port))
        return made[-1]

    yield make
    for connection in made:
        connection.close()


def _session(connect: Callable[[], Connection], size: int = 1 << 16) -> tuple[Connection, dict[str, Any]]:
    """Start one, as soon as the one before has ended; the connection, and what the other side's endpoint is."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        connection = connect()
        said = connection.ask(do="hello", version=link.VERSION, size=size)
        if "metadata" in said:
            return connection, said
        assert "somebody else" in said["error"]
        assert time.monotonic() < deadline


def test_both_directions_are_measured(serve: Serve) -> None:
    """Speeds, cost per descriptor, round trip, and copies to compare with are there; UCX names what it took."""
    findings, report = link.examine(LOOPBACK, serve.port, SIZE)
    assert report is not None, findings
    numbers = [report.copy_here, report.copy_there, report.round_trip_ms]
    for speed in (report.to_here, report.to_there):
        numbers += [speed.gigabytes_per_s, speed.us_per_descriptor]
    assert all(number > 0 for number in numbers)
    assert report.bytes == SIZE
    assert report.over or "does not say" in findings[3].text
    assert [finding.name for finding in findings][:4] == ["link to here", "link to there", "side channel", "link path"]
    assert "of memory copy here" in findings[0].text
    assert not [finding for finding in findings if finding.level is Level.PROBLEM]


HOSTILE = {
    "junk": b"junk\n",
    "empty": b"\n",
    "nothing": b"",
    "deep": b"[" * 100_000 + b"\n",
    "endless": b"a" * (4 << 20),
    "bytes": bytes(range(128, 256)) + b"\n",
    "no-tag": b"{}\n",
    "unknown": b'{"do": "shutdown"}\n',
    "before-hello": b'{"do": "copy"}\n',
    "old": b'{"do": "hello", "version": 0, "size": 65536}\n',
    "more": b'{"do": "hello", "version": 1, "size": 65536, "more": 1}\n',
    "negative": b'{"do": "hello", "version": 1, "size": -1}\n',
    "huge": b'{"do": "hello", "version": 1, "size": 1000000000000}\n',
    "not-a-number": b'{"do": "hello", "version": 1, "size": NaN}\n',
}


@pytest.mark.parametrize("sent", HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_message_ends_only_its_connection(
    serve: Serve, connect: Callable[[], Connection], sent: bytes
) -> None:
    """It gets one error at most, and others are answered."""
    connection = connect()
    connection.send(sent)
    if not sent.strip():
        connection.close()
    else:
        last = connection.line()
        assert not last or "error" in json.loads(last)
        assert not connection.line()
    assert serve.process.poll() is None
    assert "error" in connect().ask(do="ping")


def test_hostile_metadata_ends_only_its_session(serve: Serve, connect: Callable[[], Connection]) -> None:
    """NIXL refuses changed bytes, or crashes at them: the server lives, and the next session is served."""
    connection, peer = _session(connect)
    good = b64decode(peer["metadata"])
    half = len(good) // 2
    changed = good[:half] + bytes(255 - byte for byte in good[half:])
    assert "error" in connection.ask(do="measure", peer={**peer, "metadata": b64encode(changed).decode()})
    assert not connection.line()
    connection, _ = _session(connect)
    assert connection.ask(do="ping") == {}


@pytest.mark.parametrize(
    "changed", [{"fill": 0}, {"size": 1}, {"size": 1 << 40}, {"address": -1}, {"metadata": "a" * link.MOST_BYTES}]
)
def test_a_description_out_of_bounds_is_no_message(changed: dict[str, Any]) -> None:
    peer = {"metadata": "", "address": 0, "size": 1 << 16, "fill": 1}
    assert msgspec.json.decode(json.dumps({"do": "measure", "peer": peer}), type=link.Message)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(json.dumps({"do": "measure", "peer": {**peer, **changed}}), type=link.Message)


def test_one_session_at_a_time(serve: Serve, connect: Callable[[], Connection]) -> None:
    """The second one is told; when the first has gone without a word, the next one is served."""
    first, _ = _session(connect)
    assert "somebody else" in connect().ask(do="hello", version=link.VERSION, size=SIZE)["error"]
    assert first.ask(do="ping") == {}
    first.close()
    _session(connect)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGKILL, -9)])
def test_nothing_is_left_of_a_server_that_ends_during_a_session(number: int, code: int) -> None:
    """Its endpoint ends, and its port can be bound again."""
    server = Serve()
    connection = Connection(server.port)
    try:
        assert "metadata" in connection.ask(do="hello", version=link.VERSION, size=1 << 16)
        children = server.children()
        assert children
        assert server.end(number) == code
        assert not psutil.wait_procs(children, DEADLINE_S)[1]
    finally:
        connection.close()
        server.end(signal.SIGKILL)
    socket.create_server((LOOPBACK, server.port)).close()


def test_ctrl_c_ends_a_server_with_130() -> None:
    """As it does every command that is interrupted."""
    assert Serve().end(signal.SIGINT) == 130


def test_a_silent_connection_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "FIRST_S", 0.1)
    assert _sent_to_a_server(b"") == b""


def test_an_address_that_is_not_private_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets no answer, unless that is allowed."""
    monkeypatch.setattr("kvferry.protocol.authentication.is_private", lambda _: False)
    assert _sent_to_a_server(b"junk\n") == b""
    assert b"error" in _sent_to_a_server(b"junk\n", allow_public=True)


def _sent_to_a_server(data: bytes, allow_public: bool = False) -> bytes:
    """What a server in this process answers until it ends the connection."""

    async def talk() -> bytes:
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        server = link.Server(allow_public)
        task = asyncio.create_task(server.run(LOOPBACK, 0, lambda _, number: port.set_result(number)))
        reader, writer = await asyncio.open_connection(LOOPBACK, await port)
        writer.write(data)
        try:
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()
            task.cancel()
            await asyncio.wait([task])

    async def bounded() -> bytes:
        async with asyncio.timeout(DEADLINE_S):
            return await talk()

    return asyncio.run(bounded())


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server((LOOPBACK, 0)) as listener, pytest.raises(PortInUseError, match="cannot be listened on"):
        asyncio.run(link.Server().run(LOOPBACK, listener.getsockname()[1], lambda *_: None))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "no `kvferry doctor serve`"),
        (b"{}\n", "no `kvferry doctor serve`"),
        (b"[1]\n", "no `kvferry doctor serve`"),
        (b"x" * (1 << 20), "no `kvferry doctor serve`"),
        (b'{"error": "busy"}\n', "the other side says: busy"),
        (b'{"metadata": "junk", "address": 0, "size": 65536, "fill": 1}\n', "padding|NIXL|base64"),
        (b"", "ended the connection"),
    ],
    ids=["http", "empty", "list", "endless", "error", "metadata", "end"],
)
def test_whatever_answers_instead_is_a_problem(answer: bytes, said: str) -> None:
    """One line that says so, never a traceback."""
    with socket.create_server((LOOPBACK, 0)) as listener:

        def once() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(1 << 16)
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(DEADLINE_S)
                connection.recv(1)

        thread = threading.Thread(target=once)
        thread.start()
        (finding,), report = link.examine(LOOPBACK, listener.getsockname()[1], SIZE)
        thread.join(DEADLINE_S)
    assert finding.level is Level.PROBLEM
    assert any(part in finding.text for part in said.split("|")), finding
    assert "kvferry doctor serve" in finding.fix
    assert report is None


def test_nobody_there_is_a_problem() -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
    (finding,), _ = link.examine(LOOPBACK, port, SIZE)
    assert finding.level is Level.PROBLEM
    assert "no connection" in finding.text


def test_a_peer_that_lies_or_dies_is_reported() -> None:
    """Bytes that are not what the other side says it holds give no speed; a dead process is no silence."""

    async def read() -> psutil.Process:
        async with endpoint(1 << 16) as one, endpoint(1 << 16) as other:
            peer = await one.ask("describe", DEADLINE_S)
            with pytest.raises(TransferError, match="not those that the other side holds"):
                await other.ask("measure", peer={**peer, "fill": peer["fill"] % 255 + 1})
            process = psutil.Process(other.pid)
            process.send_signal(signal.SIGSEGV)
            with pytest.raises(TransferError, match=r"signal 11|Broken pipe|reset"):
                await other.ask("copy", DEADLINE_S)
            return process

    assert not asyncio.run(read()).is_running()


FAST, SLOW = Speed(10.0, 1.0), Speed(2.0, 1.0)
SHARED, TCP = (Used(3, "zero-copy", "cma/memory"),), (Used(3, "zero-copy", "tcp/eth0"),)


@pytest.mark.parametrize(
    ("there", "over", "card", "names", "said"),
    [
        (FAST, SHARED, None, [], "100% of memory copy here"),
        (FAST, SHARED, 20.0, [], "50% of the card (20 GB/s)"),
        (SLOW, SHARED, None, ["directions"], "5.0 times"),
        (FAST, TCP, None, ["link path"], "through the kernel"),
        (FAST, (), None, ["link path"], "UCX does not say"),
    ],
)
def test_a_report_is_judged(
    there: Speed, over: tuple[Used, ...], card: float | None, names: list[str], said: str
) -> None:
    found = link.findings(Report("a:1", SIZE, FAST, there, 10.0, 10.0, 0.1, over, card))
    assert [finding.name for finding in found if finding.level is Level.WARNING] == names
    assert said in " ".join(finding.text for finding in found)


def test_the_speed_of_cards_is_what_the_system_says(tmp_path: Path) -> None:
    """Of several, the sum; of one that does not say, nothing."""
    for name, text in {"eth0/speed": "10000\n", "eth1/speed": "-1\n"}.items():
        (tmp_path / "net" / name).parent.mkdir(parents=True)
        (tmp_path / "net" / name).write_text(text)
    rate = tmp_path / "ib" / "mlx5_0" / "ports" / "1" / "rate"
    rate.parent.mkdir(parents=True)
    rate.write_text("200 Gb/sec (4X HDR)\n")

    def speed(over: str) -> float | None:
        return link.card_speed((Used(1, "zero-copy", over),), tmp_path / "net", tmp_path / "ib")

    assert speed("tcp/eth0") == 1.25
    assert speed("rc_mlx5/mlx5_0:1") == 25.0
    assert speed("50% on rc_mlx5/mlx5_0:1 and 50% on tcp/eth0") == 26.25
    assert speed("50% on tcp/eth0 and 50% on tcp/eth1") is None
    assert speed("cma/memory") is None
    assert link.card_speed((), tmp_path, tmp_path) is None


@pytest.mark.parametrize(
    ("text", "target"),
    [("10.0.0.7:4000", ("10.0.0.7", 4000)), ("node-7.x:1", ("node-7.x", 1)), ("[fd00::7]:65535", ("fd00::7", 65535))],
)
def test_a_target_is_a_host_and_a_port(text: str, target: tuple[str, int]) -> None:
    assert link.parse_target(text) == target


@pytest.mark.parametrize(
    "text", ["", "host", ":1", "host:", "host:0", "host:65536", "a b:1", "fd00::7:1", "a:1:2", "x:²"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="HOST:PORT"):
        link.parse_target(text)


def test_a_report_is_json() -> None:
    report = Report("a:1", SIZE, FAST, SLOW, 10.0, 10.0, 0.1, SHARED, None)
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report
