"""What decode workers say they moved: one JSON line per finished load, in the file that KVFERRY_TRANSFER_LOG names."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

VARIABLE = "KVFERRY_TRANSFER_LOG"
POLL_S = 0.02


class Rank(msgspec.Struct, frozen=True):
    """A worker's place in its instance; the data parallel rank of a producer may be unknown."""

    dp: int | None
    pp: int
    tp: int

    def __str__(self) -> str:
        return f"dp{'?' if self.dp is None else self.dp} pp{self.pp} tp{self.tp}"


class Read(msgspec.Struct, frozen=True):
    """What was read from one producer worker."""

    producer: Rank
    bytes: int
    descriptors: int = 0


class Transfer(msgspec.Struct, frozen=True):
    """One finished load of one consumer worker; `result` says whether it may be used."""

    request: str
    consumer: Rank
    reads: tuple[Read, ...]
    ms: float
    result: str
    tokens: int = 0

    @property
    def bytes(self) -> int:
        return sum(read.bytes for read in self.reads)

    @property
    def used(self) -> bool:
        return self.result.lower() == "held"


class Moved(NamedTuple):
    """All transfers of one request: how much, and how long the slowest worker took."""

    transfers: tuple[Transfer, ...]

    @property
    def bytes(self) -> int:
        return sum(transfer.bytes for transfer in self.transfers)

    @property
    def ms(self) -> float:
        return max((transfer.ms for transfer in self.transfers), default=0.0)


NOTHING_MOVED = Moved(())


def read_transfers(log: Path) -> list[Transfer]:
    """All whole lines of the log; none where there is no such file yet.

    Raises:
        msgspec.DecodeError: a whole line is not a transfer.
    """
    if not log.exists():
        return []
    whole, _, _ = log.read_bytes().rpartition(b"\n")
    return [msgspec.json.decode(line, type=Transfer) for line in whole.splitlines()]


def await_transfers(log: Path, wanted: Callable[[Transfer], bool], count: int, deadline_s: float) -> Moved:
    """The transfers that are `wanted`, as soon as there are `count`, or what there is after `deadline_s` seconds."""
    end = time.monotonic() + deadline_s
    while True:
        found = tuple(filter(wanted, read_transfers(log)))
        if len(found) >= count or time.monotonic() > end:
            return Moved(found)
        time.sleep(POLL_S)
