"""A cluster as a table that is kept up to date, or as lines where there is no terminal to do that on."""

import os
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvferry.cli.console import out
from kvferry.cluster.control import ClusterStatus, InstanceStatus

STYLES = {"ready": "green", "failed": "red", "restarting": "red", "draining": "yellow", "stopping": "yellow"}
# Widths of the terminal from which a column is shown; names, states and load always are.
WIDTHS = {"layout": 60, "devices": 90, "log": 75}


class View(Protocol):
    """Shows a cluster while it is entered."""

    def show(self, status: ClusterStatus) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def view() -> View:
    """A live table on a terminal that can be drawn on, else lines."""
    plain = not out.is_terminal or out.is_dumb_terminal or "NO_COLOR" in os.environ
    return Lines() if plain else LiveTable()


class Lines:
    """One line for each thing that happens."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, str, int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, status: ClusterStatus) -> None:
        for one in status.instances:
            now = (one.state, one.detail, one.restarts)
            if self._seen.get(one.name) != now:
                out.print(_line(one), markup=False)
                self._seen[one.name] = now
        for gone in set(self._seen) - {one.name for one in status.instances}:
            out.print(f"{gone}: gone", markup=False)
            del self._seen[gone]


def _line(one: InstanceStatus) -> str:
    layout = f" ({one.layout})" if one.layout and one.state == "starting" else ""
    times = f", restarted {_times(one.restarts)}" if one.restarts else ""
    return f"{one.name}{layout}: {one.state}{times}" + (f": {one.detail}" if one.detail else "")


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


class LiveTable:
    """A table that is drawn anew in place."""

    def __init__(self) -> None:
        # Not the console of the other lines: that one does not fold, and a line longer than the terminal cannot be
        # drawn over.
        self._console = Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, status: ClusterStatus) -> None:
        self._live.update(table(status, self._console.width), refresh=True)


def table(status: ClusterStatus, width: int) -> Group:
    """The cluster as a table for a terminal of that width; what does not fit is left out."""
    shown = ["instance", *(column for column in ("layout", "devices") if width >= WIDTHS[column]), "state", "load"]
    shown += ["log"] if width >= WIDTHS["log"] else []
    made = Table(title=f"{status.name}: {status.state}", title_justify="left")
    for column in shown:
        made.add_column(column, overflow="fold")
    for one in status.instances:
        made.add_row(*(_cells(one)[column] for column in shown))
    return Group(made, Text(f"{status.model} on {status.url}; logs in {status.logs}", overflow="fold"))


def _cells(one: InstanceStatus) -> dict[str, Text]:
    times = f", restarted {_times(one.restarts)}" if one.restarts else ""
    detail = f": {one.detail}" if one.detail and one.state != "ready" else ""
    since = "" if one.state == "ready" else f" {one.since_s:.0f} s"
    return {
        "instance": Text(one.name),
        "layout": Text(_short(one.layout)),
        "devices": Text(",".join(one.devices)),
        "state": Text(f"{one.state}{since}{times}{detail}", style=STYLES.get(one.state, "")),
        "load": Text(load(one)),
        "log": Text(one.log.rpartition("/")[2]),
    }


def _short(layout: str) -> str:
    """A layout without its sizes of 1, where it has others."""
    return ",".join(part for part in layout.split(",") if not part.endswith("=1")) or layout.partition(",")[0]


def load(one: InstanceStatus) -> str:
    if one.running is None:
        return ""
    waiting = f", {one.waiting} waiting" if one.waiting else ""
    return f"{one.running} running{waiting}, KV {100 * (one.kv_usage or 0):.0f}%"
