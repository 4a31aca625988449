"""Reading what a process wrote before it died."""

import re
from pathlib import Path

TAIL_BYTES = 1 << 20
_EXCEPTION = re.compile(r"(?P<cause>(?:\w+\.)*\w*(?:Error|Exception|Exit): .+)$")
# What one process says when another one failed: true, but not the cause.
_CONSEQUENCES = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "Engine core proc",
    "EngineCore encountered",
    "Failed core proc",
    "cancelled",
)
_MENTIONS = (" WARNING ", " INFO ", " DEBUG ")  # lines that may name an exception which nobody raised
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def tail(log: Path, lines: int) -> list[str]:
    """The last lines of a log that say anything, without colours."""
    return [line for line in _read_end(log) if line.strip()][-lines:]


def likely_cause(log: Path) -> str | None:
    """The first exception in the log that is not merely the consequence of another process' failure."""
    for line in _read_end(log):
        found = _EXCEPTION.search(line)
        if found and not any(phrase in line for phrase in _CONSEQUENCES + _MENTIONS):
            return found["cause"].strip()
    return None


def _read_end(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            return _COLOUR.sub("", file.read().decode(errors="replace")).splitlines()
    except OSError:
        return []
