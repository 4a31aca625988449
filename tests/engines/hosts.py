"""Hosts on this machine: network, shared memory and process ids of their own, joined by a switch."""

import os
import random
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

ISOLATED = ("unshare", "--ipc", "--pid", "--mount", "--fork", "--mount-proc", "--kill-child")
"""So that UCX finds no shared memory and no process to copy from, as between hosts."""
CARD = "eth0"


def why_none() -> str | None:
    """Why there can be no hosts here."""
    missing = [tool for tool in ("ip", ISOLATED[0]) if shutil.which(tool) is None]
    if missing:
        return f"hosts are namespaces, which {' and '.join(missing)} would make"
    made = subprocess.run(["ip", "netns", "add", name := _name("try")], capture_output=True, check=False)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.decode().strip()}"
    _ip("netns", "del", name)
    return None


@dataclass(frozen=True)
class Host:
    """One of them, at an address that the others and this process reach."""

    name: str
    address: str

    def running(self, command: Sequence[str]) -> list[str]:
        """The argument vector that runs ``command`` there."""
        return ["ip", "netns", "exec", self.name, *ISOLATED, *command]

    @contextmanager
    def cut_off_from(self, other: "Host") -> Iterator[None]:
        """Whatever goes from here to the other one is lost, without a word to either."""
        route = ("-n", self.name, "route", "{}", "blackhole", f"{other.address}/32")
        _ip(*(part.format("add") for part in route))
        try:
            yield
        finally:
            _ip(*(part.format("del") for part in route))


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """So many, until the block ends."""
    net = f"10.{random.SystemRandom().randrange(100, 250)}.{random.SystemRandom().randrange(250)}"
    switch = _name("sw")
    with ExitStack() as stack:
        _ip("link", "add", switch, "type", "bridge")
        stack.callback(_ip, "link", "del", switch)
        _ip("addr", "add", f"{net}.254/24", "dev", switch)
        _ip("link", "set", switch, "up")
        made = []
        for number in range(1, count + 1):
            host = Host(_name(f"h{number}"), f"{net}.{number}")
            _ip("netns", "add", host.name)
            stack.callback(_ip, "netns", "del", host.name)
            port = _name(f"p{number}")
            _ip("link", "add", port, "type", "veth", "peer", "name", CARD, "netns", host.name)
            _ip("link", "set", port, "master", switch, "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", CARD)
            for card in ("lo", CARD):
                _ip("-n", host.name, "link", "set", card, "up")
            made.append(host)
        yield made


def _name(kind: str) -> str:
    """Of this process only; network devices have 15 letters."""
    return f"kf{os.getpid() % 10**7}{kind}"


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, check=False, timeout=30)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.decode().strip()}")
