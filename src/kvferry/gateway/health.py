"""Which instances there are, and which of their data parallel ranks may be given work now."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import aiohttp
import msgspec

from kvferry.gateway.settings import InstanceSpec, Role, Settings

logger = logging.getLogger(__name__)

LONGEST_PAUSE_S = 30.0
_USAGE = re.compile(rb'^vllm:kv_cache_usage_perc\{[^}]*\bengine="(\d+)"[^}]*\} (\S+)', re.MULTILINE)
# Not its blocks times their size: those are of all data parallel ranks and of one context parallel rank.
_CAPACITY = re.compile(rb'^vllm:cache_config_info\{[^}]*\bkv_cache_size_tokens="(\d+)"', re.MULTILINE)
_START = re.compile(rb"^process_start_time_seconds (\S+)", re.MULTILINE)
_SIDE_CHANNEL = re.compile(
    rb'^kvferry:side_channel_info\{(?=[^}]*\bengine="(\d+)")[^}]*\bat="([0-9a-f]+)@([^"]+):(\d+)"', re.MULTILINE
)
_FINGERPRINT = re.compile(rb'^kvferry:layout_info\{[^}]*\bfingerprint="([^"]*)"', re.MULTILINE)


class SideChannel(NamedTuple):
    """Where a prefill rank answers claims, and which start of it does."""

    host: str
    port: int
    incarnation: str


@dataclass(frozen=True)
class Report:
    """What the text of an instance's ``/metrics`` says.

    Attributes:
        usage: used fraction of the KV cache of each rank; empty where it does not say.
        capacity: tokens that the KV cache of each rank holds; None where it does not say.
        incarnation: changes when the instance is started anew; None where it does not say.
        fingerprint: of what its KV cache is compatible with; None where it does not say.
        side_channels: where each rank answers claims; empty where it does not say.
    """

    usage: tuple[float, ...] = ()
    capacity: int | None = None
    incarnation: bytes | None = None
    fingerprint: bytes | None = None
    side_channels: tuple[SideChannel, ...] = ()

    @classmethod
    def parse(cls, text: bytes) -> Report:
        # The labels of a node that serves some ranks of many need not begin at 0; the header counts from 0.
        usage = {int(engine): float(value) for engine, value in _USAGE.findall(text)}
        channels = {
            int(engine): SideChannel(host.decode(), int(port), incarnation.decode())
            for engine, incarnation, host, port in _SIDE_CHANNEL.findall(text)
        }
        capacity, start, fingerprint = _CAPACITY.search(text), _START.search(text), _FINGERPRINT.search(text)
        return cls(
            tuple(usage[engine] for engine in sorted(usage)),
            int(capacity[1]) if capacity else None,
            start[1] if start else None,
            fingerprint[1] if fingerprint else None,
            tuple(channels[engine] for engine in sorted(channels)),
        )


@dataclass
class Breaker:
    """Leaves a rank alone after consecutive failures, then lets one request try it.

    Attributes:
        limit: how many failures it takes.
        first_pause: seconds until the first trial; doubled, up to ``LONGEST_PAUSE_S``, after each one that fails.
        clock: monotonic seconds.
    """

    limit: int
    first_pause: float
    clock: Callable[[], float]
    _count: int = 0
    _until: float = 0.0

    def reset(self) -> None:
        self._count = 0

    def allows(self) -> bool:
        return self._count < self.limit or self.clock() >= self._until

    def trying(self) -> None:
        """A request goes to the rank; while it is open that is the trial, and others wait for how it ends."""
        pause = self.first_pause * 2 ** min(self._count - self.limit, 64)  # more would be no float in the end
        self._until = self.clock() + min(pause, LONGEST_PAUSE_S)

    def failed(self) -> None:
        self._count += 1
        self.trying()


@dataclass(eq=False)
class Rank:
    """One data parallel rank of one instance, and the work that this gateway has given it.

    Attributes:
        tokens: estimated tokens of the requests under way there.
        requests: their number.
    """

    instance: Instance
    index: int
    tokens: int = 0
    requests: int = 0

    def __post_init__(self) -> None:
        self.name = f"{self.instance.spec.url}@{self.index}"
        settings = self.instance.settings
        self.breaker = Breaker(settings.breaker_failures, settings.breaker_pause, self.instance.clock)

    @property
    def load(self) -> float:
        """Of prefill: outstanding tokens. Of decode: the occupied part of the KV cache, where its size is known."""
        return max(self.usage, self.cost(self.tokens)) if self._size else float(self.tokens)

    def cost(self, tokens: int) -> float:
        """What ``tokens`` add to the load."""
        return tokens / (self._size or 1)

    @property
    def _size(self) -> int | None:
        return self.instance.report.capacity if self.instance.spec.role is Role.DECODE else None

    @property
    def usage(self) -> float:
        """Of its KV cache as it last said, 0 to 1."""
        return dict(enumerate(self.instance.report.usage)).get(self.index, 0.0)

    @property
    def side_channel(self) -> SideChannel | None:
        return dict(enumerate(self.instance.report.side_channels)).get(self.index)

    @property
    def usable(self) -> bool:
        return self.instance.up and not self.instance.draining and self.breaker.allows()

    @property
    def header(self) -> str | None:
        """The value of the rank header; None for the only rank there is."""
        return str(self.index) if len(self.instance.ranks) > 1 else None

    @contextlib.contextmanager
    def working(self, tokens: int) -> Iterator[None]:
        self.breaker.trying()
        self.tokens += tokens
        self.requests += 1
        try:
            yield
        finally:
            self.tokens -= tokens
            self.requests -= 1


@dataclass(eq=False)
class Instance:
    """One vLLM API server.

    Attributes:
        up: it was well when it was last asked.
        draining: it is given nothing new.
        probing: it is being asked.
    """

    spec: InstanceSpec
    settings: Settings
    clock: Callable[[], float]
    up: bool = False
    draining: bool = False
    probing: bool = False
    report: Report = Report()
    ranks: list[Rank] = field(default_factory=list)
    _misses: int = 0

    def __post_init__(self) -> None:
        self._resize(self.spec.dp or 1)

    def reached(self, report: Report) -> None:
        """It is healthy and says this of itself."""
        if report.incarnation != self.report.incarnation:
            for rank in self.ranks:
                rank.breaker.reset()
        self._resize(self.spec.dp or len(report.usage) or len(self.ranks))
        self.report = report
        self.answered()
        self._set_up(True)

    def answered(self) -> None:
        """A request was answered; what answers requests is not lost, however slow it is to answer probes."""
        self._misses = 0

    def missed(self, limit: int = 1) -> None:
        """It was asked in vain; the ``limit``-th time in a row it is lost, until a probe succeeds. What refuses
        connections, or says that it is not well, is lost at once; what gives no answer may only be slow.
        """
        self._misses += 1
        if self._misses >= limit:
            self._set_up(False)

    def _set_up(self, up: bool) -> None:
        if up != self.up:
            logger.warning("%s instance %s is %s", self.spec.role, self.spec.url, "up" if up else "down")
        self.up = up

    def _resize(self, ranks: int) -> None:
        self.ranks = self.ranks[:ranks]
        self.ranks += [Rank(self, index) for index in range(len(self.ranks), ranks)]

    def suits(self, other: Instance) -> bool:
        """Whether one can read what the other prefilled, as far as both say."""
        mine, theirs = self.report.fingerprint, other.report.fingerprint
        return mine is None or theirs is None or mine == theirs

    async def probe(self, session: aiohttp.ClientSession) -> None:
        """Ask it how it is; whatever it answers, this does not fail."""
        self.probing = True
        try:
            async with asyncio.timeout(self.settings.probe_timeout):
                async with session.get(f"{self.spec.url}/health") as answer:
                    if answer.status != 200:
                        self.missed()
                        return
                async with session.get(f"{self.spec.url}/metrics") as answer:
                    text = await answer.read() if answer.status == 200 else b""
            self.reached(Report.parse(text))
        except Exception as error:
            refused = isinstance(getattr(error, "os_error", None), ConnectionRefusedError)
            self.missed(1 if refused else self.settings.probe_misses)
        finally:
            self.probing = False


class Fleet:
    """All instances, kept up to date by ``watch``; worker processes of one gateway share them through a file."""

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        self._settings, self._clock = settings, clock
        self.instances: dict[str, Instance] = {}
        for spec in settings.instances:
            self.add(spec)

    def add(self, spec: InstanceSpec) -> Instance:
        return self.instances.setdefault(spec.url, Instance(spec, self._settings, self._clock))

    def remove(self, url: str) -> None:
        """Give it nothing more; requests under way go on."""
        self.instances.pop(url).draining = True

    def usable(self, role: Role, partner: Instance | None = None) -> list[Rank]:
        """Ranks of instances that suit ``partner``; without one, any decode instance, as each of those does itself."""
        partners = [partner] if partner else [one for one in self.instances.values() if one.spec.role is Role.DECODE]
        return [
            rank
            for instance in self.instances.values()
            if instance.spec.role is role and any(instance.suits(one) for one in partners)
            for rank in instance.ranks
            if rank.usable
        ]

    async def probe(self, session: aiohttp.ClientSession) -> None:
        """Ask every instance once, at the same time."""
        await asyncio.gather(*(one.probe(session) for one in self.instances.values()))

    async def watch(self, session: aiohttp.ClientSession) -> None:
        """Probe all instances, for ever. One that is slow delays no other."""
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(self._settings.probe_interval)
                self._load()
                for instance in self.instances.values():
                    if not instance.probing:
                        group.create_task(instance.probe(session))

    def save(self) -> None:
        """Tell the other worker processes; without a file there are none."""
        if file := self._settings.shared_file:
            scratch = Path(f"{file}.{os.getpid()}")
            scratch.write_bytes(msgspec.json.encode([(one.spec, one.draining) for one in self.instances.values()]))
            scratch.replace(file)

    def _load(self) -> None:
        """Take over what any of them wrote last, which is there whole or not at all."""
        file = self._settings.shared_file
        if file is None or not os.path.exists(file):
            return
        try:
            members = msgspec.json.decode(Path(file).read_bytes(), type=list[tuple[InstanceSpec, bool]])
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("the instances in %s cannot be read, so they stay as they are: %s", file, error)
            return
        for url in self.instances.keys() - {spec.url for spec, _ in members}:
            self.remove(url)
        for spec, draining in members:
            self.add(spec).draining = draining
