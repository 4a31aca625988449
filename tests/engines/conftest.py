"""Real vLLM engines, started when a test first needs them and kept while there is room."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvferry.cluster.commands import cpu_build_installed
from kvferry.cluster.dispatch import Dispatcher
from kvferry.cluster.launch import logging_transfers, start_instances
from kvferry.cluster.ports import free_ports
from kvferry.cluster.spec import InstanceSpec, Layout
from kvferry.cluster.supervisor import PeakMemory, Supervisor
from kvferry.cluster.tiny import tiny

MOST_WORKERS = 8  # alive at once; about 10 GB with the processes around them
CACHE_BYTES = 32 << 20  # small, so that a test can make an engine reuse its blocks
START_DEADLINE_S = 300.0
SUMMARY = pytest.StashKey[str]()


@dataclass
class Instance:
    """A running engine, and the log of what its workers loaded."""

    spec: InstanceSpec
    transfer_log: Path

    @property
    def url(self) -> str:
        return self.spec.url


@dataclass
class Fleet:
    """Starts one engine per (model, layout, role, copy) and reuses it; the least recently used one makes room."""

    supervisor: Supervisor
    dispatcher: Dispatcher
    directory: Path
    starts: int = 0
    start_seconds: float = 0.0
    _running: dict[tuple[str, str, str | None, int], Instance] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def plain(self, kind: str) -> Instance:
        """An engine without a connector."""
        [instance] = self._instances([(kind, "tp=1", None, 0)])
        return instance

    def pair(self, kind: str, prefill: str, decode: str) -> tuple[Instance, Instance]:
        """Two engines with the connector; two of them also where the layouts are the same."""
        copy = 1 if prefill == decode else 0
        first, second = self._instances([(kind, prefill, "kv_both", 0), (kind, decode, "kv_both", copy)])
        return first, second

    def _instances(self, keys: list[tuple[str, str, str | None, int]]) -> list[Instance]:
        missing = [key for key in keys if key not in self._running]
        if missing:
            self._make_room(missing, keys)
            self._start(missing)
        for key in keys:
            self._running[key] = self._running.pop(key)  # most recently used last
        return [self._running[key] for key in keys]

    def _make_room(self, missing: list[tuple[str, str, str | None, int]], keep: list) -> None:
        wanted = sum(Layout.parse(layout).workers for _, layout, _, _ in missing)
        for key in list(self._running):
            if wanted + self._workers() <= MOST_WORKERS:
                return
            if key not in keep:
                self.supervisor.stop(self._running.pop(key).spec.name)

    def _workers(self) -> int:
        return sum(instance.spec.layout.workers for instance in self._running.values())

    def _start(self, keys: list[tuple[str, str, str | None, int]]) -> None:
        begin = time.monotonic()
        instances = {key: self._prepare(*key) for key in keys}
        specs = [instance.spec for instance in instances.values()]
        start_instances(self.supervisor, specs, cpu_build_installed(), lambda *_: None, START_DEADLINE_S)
        for spec in specs:
            self._warm_up(spec)
        self._running.update(instances)
        self.starts += len(keys)
        self.start_seconds += time.monotonic() - begin

    def _prepare(self, kind: str, layout: str, role: str | None, copy: int) -> Instance:
        parsed = Layout.parse(layout)
        name = f"{next(self._numbers):02d}-{kind}-{parsed.label}-{role or 'plain'}-{copy}"
        log = self.directory / f"{name}.jsonl"
        [port] = free_ports(1)
        spec = InstanceSpec(name, tiny(kind), parsed, port, role, kv_cache_bytes=CACHE_BYTES)
        return Instance(logging_transfers(spec, log), log)

    def _warm_up(self, spec: InstanceSpec) -> None:
        # Some functions are compiled at the first request that needs them, which takes seconds.
        for rank in range(spec.layout.dp):
            self.dispatcher.complete(spec.url, [7, 9, 11], rank=rank if spec.layout.dp > 1 else None)


@pytest.fixture(scope="session")
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("engines")
    with Supervisor(directory) as supervisor, PeakMemory(supervisor) as memory, Dispatcher() as dispatcher:
        fleet = Fleet(supervisor, dispatcher, directory)
        yield fleet
    request.config.stash[SUMMARY] = (
        f"{fleet.starts} engine starts took {fleet.start_seconds:.0f} s; "
        f"peak memory of the engines {memory.bytes / 1e9:.1f} GB"
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    summary = terminalreporter.config.stash.get(SUMMARY, None)
    if summary:
        terminalreporter.write_line(summary)
