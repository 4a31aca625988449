"""What a check has found."""

from collections.abc import Callable, Iterable
from enum import StrEnum

import msgspec


class Level(StrEnum):
    """How bad it is. Only a problem makes the command fail."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(msgspec.Struct, frozen=True):
    """One line: what was looked at, how it is, and what to do about it where it is not well."""

    name: str
    level: Level
    text: str
    fix: str = ""


def ok(name: str, text: str) -> Finding:
    return Finding(name, Level.OK, text)


def warning(name: str, text: str, fix: str) -> Finding:
    return Finding(name, Level.WARNING, text, fix)


def problem(name: str, text: str, fix: str) -> Finding:
    return Finding(name, Level.PROBLEM, text, fix)


Check = Callable[[], Finding | Iterable[Finding]]


def guarded(name: str, check: Check) -> list[Finding]:
    """What `check` finds. One that fails itself says nothing about the machine: a warning, never a traceback."""
    try:
        found = check()
        return [found] if isinstance(found, Finding) else list(found)
    except Exception as error:
        text = f"this could not be checked: {type(error).__name__}: {error}"
        return [warning(name, text, "look at it by hand, and report this as an error of kvferry doctor")]


def failed(found: Iterable[Finding]) -> bool:
    """Whether the command is to fail."""
    return any(finding.level is Level.PROBLEM for finding in found)
