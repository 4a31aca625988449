"""A cluster as a table that is kept up to date, or as lines where there is no terminal to do that on."""

import os
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from kvferry.cli.console import out
from kvferry.cli.tables import Rows
from kvferry.cluster.control import ClusterStatus, InstanceStatus

STYLES = {"ready": "green", "failed": "red", "restarting": "red", "draining": "yellow", "stopping": "yellow"}
NUMBERS = ("running", "waiting", "KV")
# Widths of the terminal from which something is shown; names, states and load always are.
WIDTHS = {"since": 55, "layout": 66, "log": 80, "devices": 96}


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
    left = [column for column in ("layout", "devices") if width >= WIDTHS[column]]
    right = ["log"] if width >= WIDTHS["log"] else []
    shown = ["instance", *left, "state", *NUMBERS, *right]
    made = Rows(f"{status.name}: {status.state}", shown, NUMBERS)
    for one in status.instances:
        made.add(*(_cells(one, width)[column] for column in shown))
    notes = filter(None, map(_note, status.instances))
    where = Text(f"{status.model} on {status.url}\nlogs in {status.logs}", overflow="fold")
    return Group(made, Text(), *notes, where)


def _cells(one: InstanceStatus, width: int) -> dict[str, Text]:
    since = "" if one.state == "ready" or width < WIDTHS["since"] else f" {one.since_s:.0f} s"
    return {
        "instance": Text(one.name),
        "layout": Text(_short(one.layout)),
        "devices": Text(",".join(one.devices)),
        "state": Text(f"{one.state}{since}", style=STYLES.get(one.state, "")),
        "running": Text("" if one.running is None else str(one.running)),
        "waiting": Text("" if one.waiting is None else str(one.waiting)),
        "KV": Text("" if one.kv_usage is None else f"{100 * one.kv_usage:.0f}%"),
        "log": Text(one.log.rpartition("/")[2]),
    }


def _note(one: InstanceStatus) -> Text | None:
    """What there is to say of an instance that no column has room for."""
    times = f"restarted {_times(one.restarts)}" if one.restarts else ""
    detail = one.detail.removeprefix(f"{one.name} ") if one.state != "ready" else ""
    said = ": ".join(filter(None, (times, detail)))
    return Text(f"{one.name} {said}" if times else f"{one.name}: {said}", STYLES.get(one.state, "")) if said else None


def _short(layout: str) -> str:
    """A layout without its sizes of 1, where it has others."""
    return ",".join(part for part in layout.split(",") if not part.endswith("=1")) or layout.partition(",")[0]
