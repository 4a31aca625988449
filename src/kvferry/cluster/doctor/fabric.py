"""Which UCX transports there are, and which one a transfer really takes.

UCX writes both down when it is asked to: a table of transports when it starts, and the protocols it has used, with
counts, when it ends. So two processes move a few bytes, and their logs are read.
"""

import asyncio
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

import msgspec

from kvferry.cluster.child import LOG_PATTERN, ucx_log
from kvferry.cluster.doctor.endpoint import endpoint
from kvferry.cluster.doctor.findings import Finding, ok, problem, warning
from kvferry.cluster.doctor.machine import rdma_devices
from kvferry.errors import KVFerryError

SIZE = 1 << 20
RDMA = ("rc", "dc", "ud", "srd", "gga")
"""How the names of UCX transports over RDMA begin."""
_VERSION = re.compile(r"UCX\s+INFO\s+Version (\S+)")
_PREFIX = re.compile(r"^(?:\[[^\]]*\] )*\s*")


class Used(msgspec.Struct, frozen=True):
    """One protocol that reads have taken: how often, how it copies, and over which transport and device."""

    count: int
    how: str
    over: str

    def __str__(self) -> str:
        return f"{self.over} ({self.how})"


def _rows(log: str) -> Iterable[list[str]]:
    """The cells of every line of a table."""
    for line in log.splitlines():
        text = _PREFIX.sub("", line)
        if text.startswith("|"):
            yield [cell.strip() for cell in text.strip().strip("|").split("|")]


def available(log: str) -> dict[str, list[str]]:
    """Enabled transports and their enabled devices."""
    found: dict[str, list[str]] = {}
    inside = False
    for cells in _rows(log):
        if len(cells) == 1:
            inside = cells[0].startswith("Available Transports") or (inside and not cells[0].startswith("Legend"))
        elif inside and len(cells) == 4 and cells[2].startswith("+ "):
            devices = re.findall(r"\+ (\S+)", cells[3])
            found.setdefault(cells[2][2:], []).extend(devices)
    return found


def used(log: str) -> list[Used]:
    """What remote reads have taken, the most used first; needs ``UCX_PROTO_INFO=used``."""
    found: list[Used] = []
    reads = False
    for cells in _rows(log):
        if len(cells) == 1:
            reads = "remote memory read" in cells[0] or (reads and not cells[0].count(" by ucp_"))
        elif reads and len(cells) == 4 and cells[0].isdigit():
            found.append(Used(int(cells[0]), cells[2], cells[3]))
    return sorted(found, key=lambda one: -one.count)


def version(log: str) -> str | None:
    match = _VERSION.search(log)
    return match and match[1]


def read_logs(directory: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in sorted(directory.glob(LOG_PATTERN)))


def transports(found: dict[str, list[str]], ucx: str | None, devices: list[str]) -> Finding:
    """`devices` are the RDMA devices that the system shows."""
    if not found:
        fix = "look at the output of UCX_LOG_LEVEL=debug by hand"
        return warning("ucx transports", "UCX has not listed its transports", fix)
    text = f"UCX {ucx or 'of unknown version'}: {', '.join(found)}"
    if any(name.startswith(RDMA) for name in found):
        return ok("ucx transports", text)
    if devices:
        fix = "unset UCX_TLS; check the limit of locked memory and the access to /dev/infiniband"
        return problem("ucx transports", f"{text}; {', '.join(devices)} is there and UCX does not use it", fix)
    if "tcp" not in found:
        return warning("ucx transports", f"{text}; none goes to another host", "add tcp to UCX_TLS")
    fix = (
        "nothing on one machine; between hosts use RDMA (InfiniBand, RoCE, EFA), with /dev/infiniband in the container"
    )
    return warning("ucx transports", f"{text}; no RDMA, so TCP is what goes between hosts", fix)


def transfer(taken: list[Used]) -> Finding:
    """`taken` is what reads between two processes of this machine went over."""
    name = "ucx transfer"
    if not taken:
        fix = "read the log of a run with UCX_PROTO_INFO=used"
        return warning(name, "bytes were moved and were right, and UCX does not say over what", fix)
    text = f"two processes here read over {'; '.join(map(str, taken))}"
    if any(one.over.startswith("tcp/") or "on tcp/" in one.over for one in taken):
        fix = "unset UCX_TLS, or add cma,sysv,posix to it; containers need one PID namespace and SYS_PTRACE for cma"
        return warning(name, f"{text}, not over shared memory", fix)
    return ok(name, text)


async def tried(directory: Path) -> None:
    """One endpoint reads from another.

    Raises:
        TransferError: it did not work.
    """
    async with endpoint(SIZE) as other, endpoint(SIZE, ucx_log(directory, "debug")) as reader:
        peer = await other.ask("describe")
        await reader.ask("describe")
        await reader.ask("measure", peer=peer)


def this_fabric() -> list[Finding]:
    with tempfile.TemporaryDirectory(prefix="kvferry-doctor-") as directory:
        try:
            asyncio.run(tried(Path(directory)))
            log = read_logs(Path(directory))
        except KVFerryError as error:
            log = read_logs(Path(directory))
            fix = "install nixl and the nixl-cu12 or nixl-cu13 that fits torch; unset UCX_TLS and UCX_NET_DEVICES"
            found = problem("ucx transfer", f"two processes of this machine cannot exchange bytes: {error}", fix)
            return [transports(available(log), version(log), rdma_devices()), found] if log else [found]
    return [transports(available(log), version(log), rdma_devices()), transfer(used(log))]
