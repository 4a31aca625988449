"""Which instances there are, and which of their data parallel ranks may be given work now."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import aiohttp

from kvferry.gateway.settings import InstanceSpec, Role, Settings

logger = logging.getLogger(__name__)

LONGEST_PAUSE_S = 30.0
MAX_METRICS_BYTES = 32 << 20
_ENGINE = re.compile(rb'^vllm:[^\n]*?\bengine="(\d+)"', re.MULTILINE)
_USAGE = re.compile(rb'^vllm:kv_cache_usage_perc\{[^}]*\bengine="(\d+)"[^}]*\} (\S+)', re.MULTILINE)
_BLOCKS = re.compile(rb'^vllm:cache_config_info\{[^}]*\bblock_size="(\d+)"[^}]*\bnum_gpu_blocks="(\d+)"', re.MULTILINE)
_START = re.compile(rb"^process_start_time_seconds (\S+)", re.MULTILINE)
_FINGERPRINT = re.compile(rb'^kvferry:layout_info\{[^}]*\bfingerprint="([^"]*)"', re.MULTILINE)


@dataclass(frozen=True)
class Report:
    """What the text of an instance's ``/metrics`` says.

    Attributes:
        ranks: number of engine cores; None where it does not say.
        usage: used fraction of the KV cache, by rank.
        capacity: tokens that the KV cache of a rank holds; None where it does not say.
        incarnation: changes when the instance is started anew; None where it does not say.
        fingerprint: of what its KV cache is compatible with; None where it does not say.
    """

    ranks: int | None = None
    usage: dict[int, float] = field(default_factory=dict)
    capacity: int | None = None
    incarnation: bytes | None = None
    fingerprint: bytes | None = None

    @classmethod
    def parse(cls, text: bytes) -> Report:
        # The labels of a node that serves some ranks of many need not begin at 0; the header counts from 0.
        engines = {label: at for at, label in enumerate(sorted({int(label) for label in _ENGINE.findall(text)}))}
        usage = {engines[int(label)]: float(value) for label, value in _USAGE.findall(text)}
        blocks, start, fingerprint = _BLOCKS.search(text), _START.search(text), _FINGERPRINT.search(text)
        return cls(
            ranks=len(engines) or None,
            usage=usage,
            capacity=int(blocks[1]) * int(blocks[2]) if blocks else None,
            incarnation=start[1] if start else None,
            fingerprint=fingerprint[1] if fingerprint else None,
        )


class Breaker:
    """Leaves a rank alone after consecutive failures, then lets one request try it.

    Args:
        failures: how many it takes.
        pause: seconds until the first trial; doubled, up to ``LONGEST_PAUSE_S``, after each one that fails.
        clock: monotonic seconds.
    """

    def __init__(self, failures: int, pause: float, clock: Callable[[], float]) -> None:
        self._limit, self._first_pause, self._clock = failures, pause, clock
        self.reset()

    def reset(self) -> None:
        self._count, self._pause, self._until = 0, self._first_pause, 0.0

    @property
    def closed(self) -> bool:
        return self._count < self._limit

    def allows(self) -> bool:
        return self.closed or self._clock() >= self._until

    def trying(self) -> None:
        """A request goes to the rank; while it is open that is the trial, and others wait for how it ends."""
        if not self.closed:
            self._until = self._clock() + self._pause

    def failed(self) -> None:
        self._count += 1
        if not self.closed:
            self._until = self._clock() + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE_S)


class Rank:
    """One data parallel rank of one instance, and the work that this gateway has given it.

    Attributes:
        tokens: estimated tokens of the requests under way there.
        requests: their number.
        usage: of its KV cache as it last said, 0 to 1.
    """

    def __init__(self, instance: Instance, index: int, breaker: Breaker) -> None:
        self.instance, self.index, self.breaker = instance, index, breaker
        self.tokens = self.requests = 0
        self.usage = 0.0
        self.name = f"{instance.spec.url}@{index}"

    @property
    def load(self) -> float:
        """Of prefill: outstanding tokens. Of decode: the occupied part of the KV cache, where its size is known."""
        if self.instance.spec.role is Role.PREFILL or not self.instance.capacity:
            return float(self.tokens)
        return max(self.usage, self.tokens / self.instance.capacity)

    def cost(self, tokens: int) -> float:
        """What ``tokens`` add to the load."""
        if self.instance.spec.role is Role.PREFILL or not self.instance.capacity:
            return float(tokens)
        return tokens / self.instance.capacity

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


class Instance:
    """One vLLM API server."""

    def __init__(self, spec: InstanceSpec, new_breaker: Callable[[], Breaker]) -> None:
        self.spec = spec
        self._new_breaker = new_breaker
        self.up = self.draining = False
        self._misses = 0
        self.capacity: int | None = None
        self.fingerprint: bytes | None = None
        self._incarnation: bytes | None = None
        self.ranks: list[Rank] = []
        self._resize(spec.dp or 1)

    @property
    def requests(self) -> int:
        return sum(rank.requests for rank in self.ranks)

    def reached(self, report: Report) -> None:
        """It is healthy and says this of itself."""
        if report.incarnation != self._incarnation:
            self._incarnation = report.incarnation
            for rank in self.ranks:
                rank.breaker.reset()
        self._resize(self.spec.dp or report.ranks or len(self.ranks))
        self.capacity = report.capacity
        self.fingerprint = report.fingerprint
        for rank in self.ranks:
            rank.usage = report.usage.get(rank.index, 0.0)
        self._misses = 0
        self._set_up(True)

    def answered(self) -> None:
        """A request was answered; what answers requests is not lost, however slow it is to answer probes."""
        self._misses = 0

    def missed(self, limit: int) -> None:
        """A probe failed; an instance that is only slow to answer is not lost before the ``limit``-th in a row."""
        self._misses += 1
        if self._misses >= limit:
            self.lost()

    def lost(self) -> None:
        """It accepts no connection, or says it is not well; the next probe that succeeds brings it back."""
        self._set_up(False)

    def _set_up(self, up: bool) -> None:
        if up != self.up:
            logger.warning("%s instance %s is %s", self.spec.role, self.spec.url, "up" if up else "down")
        self.up = up

    def _resize(self, ranks: int) -> None:
        self.ranks = self.ranks[:ranks]
        self.ranks += [Rank(self, index, self._new_breaker()) for index in range(len(self.ranks), ranks)]

    def suits(self, other: Instance) -> bool:
        """Whether one can read what the other prefilled, as far as both say."""
        return None in (self.fingerprint, other.fingerprint) or self.fingerprint == other.fingerprint


class Fleet:
    """All instances, kept up to date by ``watch``."""

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self.instances: dict[str, Instance] = {}
        for spec in settings.instances:
            self.add(spec)

    def add(self, spec: InstanceSpec) -> Instance:
        def breaker() -> Breaker:
            return Breaker(self._settings.breaker_failures, self._settings.breaker_pause, self._clock)

        return self.instances.setdefault(spec.url, Instance(spec, breaker))

    def remove(self, url: str) -> None:
        """Give it nothing more; requests under way go on."""
        self.instances.pop(url).draining = True

    def usable(self, role: Role) -> list[Rank]:
        """Prefill ranks without a decode rank that could read from them are not among them."""
        return [
            rank
            for instance in self.instances.values()
            if instance.spec.role is role and (role is Role.DECODE or self._has_reader(instance))
            for rank in instance.ranks
            if rank.usable
        ]

    def _has_reader(self, instance: Instance) -> bool:
        return any(other.spec.role is Role.DECODE and other.suits(instance) for other in self.instances.values())

    async def watch(self, session: aiohttp.ClientSession, before: Callable[[], None]) -> None:
        """Probe all instances, for ever; ``before`` is called before each round. One that is slow delays no other."""
        probing: set[Instance] = set()
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(self._settings.probe_interval)
                before()
                for instance in set(self.instances.values()) - probing:
                    probing.add(instance)
                    group.create_task(self._probe(session, instance, probing.discard))

    async def probe(self, session: aiohttp.ClientSession) -> None:
        """Ask every instance once, at the same time."""
        await asyncio.gather(*(self._probe(session, instance) for instance in list(self.instances.values())))

    async def _probe(
        self, session: aiohttp.ClientSession, instance: Instance, done: Callable[[Instance], None] = lambda _: None
    ) -> None:
        url = instance.spec.url
        try:
            async with asyncio.timeout(self._settings.probe_timeout):
                async with session.get(f"{url}/health") as answer:
                    healthy = answer.status == 200
                report = Report.parse(await _metrics(session, url) if healthy else b"")
        except Exception as error:  # whatever an instance answers, the watch goes on
            refused = isinstance(getattr(error, "os_error", None), ConnectionRefusedError)
            instance.missed(1 if refused else self._settings.probe_misses)
        else:
            if healthy:
                instance.reached(report)
            else:
                instance.lost()
        finally:
            done(instance)


async def _metrics(session: aiohttp.ClientSession, url: str) -> bytes:
    async with session.get(f"{url}/metrics") as answer:
        return await answer.content.read(MAX_METRICS_BYTES) if answer.status == 200 else b""
