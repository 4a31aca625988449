"""Many reads in few lines: ranks that do the same thing are one row of the table."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from kvferry.cluster.pairing import Read
from kvferry.geometry import Span

SHOWN_SINGLY = 32


class Group(NamedTuple):
    """Decode ranks of one stage that read as many bytes in as many reads from one prefill stage.

    `layers` and `heads` are half open and span all reads of the group. `bytes_per_token_each` is an average over the
    tokens of the prompt, which context parallel ranks may share out.
    """

    readers: str
    producers: str
    layers: Span
    heads: Span
    reads_each: int
    bytes_per_token_each: int
    state_bytes_each: int


def grouped(reads: Sequence[Read], tokens: int) -> list[Group]:
    """Each read by itself while there are few, neighbouring alike readers together where there are many.

    `tokens` are the prompt's.
    """
    if len(reads) <= SHOWN_SINGLY:
        return [_group([[read]], tokens) for read in reads]
    return list(_groups(reads, tokens))


def _groups(reads: Iterable[Read], tokens: int) -> Iterator[Group]:
    for _, pair in groupby(reads, key=lambda read: (read.reader.pp, read.producer.pp)):
        by_reader = [list(group) for _, group in groupby(pair, key=lambda read: read.reader)]
        for _, alike in groupby(by_reader, key=lambda mine: (len(mine), *_bytes(mine))):
            yield _group(list(alike), tokens)


def _bytes(reads: Sequence[Read]) -> tuple[int, int]:
    """Of each token, as if all were read, and of a request's states: alike also where a token more is held."""
    return sum(read.bytes_per_token for read in reads), sum(read.state_bytes for read in reads)


def _group(by_reader: Sequence[Sequence[Read]], tokens: int) -> Group:
    every = [read for mine in by_reader for read in mine]
    first, producers = by_reader[0], {read.producer.tp for read in every}
    readers = [mine[0].reader.tp for mine in by_reader]
    return Group(
        f"pp{every[0].reader.pp} {numbered('tp', readers[0], readers[-1] + 1)}",
        f"pp{every[0].producer.pp} {numbered('tp', min(producers), max(producers) + 1, len(producers))}",
        every[0].layers,
        Span(min(read.heads.start for read in every), max(read.heads.stop for read in every)),
        len(first),
        round(sum(read.bytes_per_token * read.tokens for read in every) / len(by_reader) / tokens),
        _bytes(first)[1],
    )


def numbered(kind: str, start: int, stop: int, count: int | None = None) -> str:
    """``tp3``, ``tp0..7``, or ``tp0..12 (4 of them)`` where only `count` of the range are meant."""
    some = "" if count in (None, stop - start) else f" ({count} of them)"
    return f"{kind}{inclusive(Span(start, stop))}{some}"


def inclusive(span: Span) -> str:
    """A half-open range as people count: ``0..7``, ``3`` alone, or nothing."""
    if not span:
        return "none"
    return f"{span.start}..{span.stop - 1}" if span.size > 1 else str(span.start)
