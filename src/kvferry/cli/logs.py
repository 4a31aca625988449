"""``kvferry logs``: what the processes of a cluster wrote."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from kvferry.cli.console import examples, left_alone, reported_errors
from kvferry.cli.status import NAME_HELP
from kvferry.cluster.logs import tail
from kvferry.cluster.manifest import DEFAULT_NAME
from kvferry.cluster.state import StateDirectory
from kvferry.errors import ClusterError

POLL_S = 0.2
EXAMPLE = examples("kvferry logs decode-0 --lines 100", "kvferry logs --follow")


def logs(
    instances: Annotated[list[str] | None, typer.Argument(help="Of these only, as in decode-0 or gateway.")] = None,
    name: Annotated[str, typer.Option(help=NAME_HELP)] = DEFAULT_NAME,
    lines: Annotated[int, typer.Option(help="How many of the last lines of each.", min=0)] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is added, until it stops.")] = False,
) -> None:
    """Show the last lines of the logs, each with its instance's name; also after the cluster has stopped."""
    with reported_errors(), left_alone():
        state = StateDirectory(name)
        files = _files(state, instances or [])
        followed = [Followed(file) for file in files]
        for one in followed:
            for line in tail(one.path, lines):
                _show(one, line)
        while follow and state.running:
            for one in followed:
                for line in one.added():
                    _show(one, line)
            time.sleep(POLL_S)


def _show(one: "Followed", line: str) -> None:
    typer.echo(f"{one.path.stem} | {line}")


def _files(state: StateDirectory, wanted: Sequence[str]) -> list[Path]:
    there = {file.stem: file for file in sorted(state.logs.glob("*.log"))}
    if state.own_log.exists():
        there["up"] = state.own_log
    if not there:
        raise ClusterError(f"there are no logs of a cluster named {state.name} in {state.path}")
    for one in wanted:
        if one not in there:
            raise ClusterError(f"there is no log of {one!r}; there are: {', '.join(there)}")
    return [there[one] for one in wanted] or list(there.values())


class Followed:
    """A file that grows, and is begun anew when its process is restarted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._rest = b""
        self._open(at_end=True)

    def _open(self, at_end: bool) -> None:
        try:
            self._file = self.path.open("rb")
        except OSError:
            self._file = None  # it is being replaced
        if self._file and at_end:
            self._file.seek(0, 2)

    def added(self) -> list[str]:
        """Whole lines that were written since the last call."""
        whole = self._read()
        if self._replaced():
            if self._file:
                self._file.close()
            self._open(at_end=False)
            whole += self._read()
        return [line.decode(errors="replace") for line in whole]

    def _read(self) -> list[bytes]:
        if self._file is None:
            return []
        *whole, self._rest = (self._rest + self._file.read()).split(b"\n")
        return whole

    def _replaced(self) -> bool:
        try:
            return self._file is None or self.path.stat().st_ino != os.fstat(self._file.fileno()).st_ino
        except OSError:
            return False
