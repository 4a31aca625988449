"""Real vLLM engines, started when a test first needs them and kept while there is room."""

import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from kvferry.cluster.commands import CONNECTOR, CPU_PATIENCE, cpu_build_installed
from kvferry.cluster.dispatch import Dispatcher
from kvferry.cluster.launch import logging_transfers, start_instances
from kvferry.cluster.ports import free_ports
from kvferry.cluster.spec import InstanceSpec, Layout
from kvferry.cluster.supervisor import Managed, PeakMemory, Supervisor
from kvferry.cluster.tiny import tiny

from .drafters import eagle

MOST_WORKERS = 8  # alive at once; about 10 GB with the processes around them
CACHE_BYTES = 32 << 20  # small, so that a test can make an engine reuse its blocks
START_DEADLINE_S = 600.0  # a start beside a load takes many times as long
DEADLINES = {
    "kv_lease_duration": 10,
    "claim_timeout": 10,
    "handshake_timeout": 5,
    "read_timeout": 2,
    "ack_timeout": 15,
}


def _faults(policy: str, side_channel_port: int, *extra: str) -> dict[str, Any]:
    """Short deadlines, the same address after a restart, and a transport on which a read needs the process it reads
    from: over shared memory it does not."""
    return {
        "connector_config": {**DEADLINES, "side_channel_port": side_channel_port},
        "kv_load_failure_policy": policy,
        "environment": {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"},
        "extra": extra,
    }


def _beside(*children: dict[str, Any]) -> dict[str, Any]:
    """Children of vLLM's MultiConnector, in this order. Requests are loaded by the first that has something."""
    connectors = [{"kv_role": "kv_both", **child} for child in children]
    parent = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    config = {**parent, "kv_connector_extra_config": {"connectors": connectors}}
    # Without the development interface nobody can make an engine forget its prefix cache.
    return _configured(config, environment={"VLLM_SERVER_DEV_MODE": "1"})


def _staged(variant: dict[str, Any]) -> dict[str, Any]:
    """A variant with host staging, which the CPU build has no use for, nor a setting."""
    more = {**CPU_PATIENCE, **variant.pop("connector_config", {})}
    config = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": "tests.engines.staged",
        "kv_role": "kv_both",
        "kv_load_failure_policy": variant.pop("kv_load_failure_policy", "fail"),
        "kv_connector_extra_config": more,
    }
    return _configured(config, **variant)


def _configured(
    config: dict[str, Any], environment: Mapping[str, str] | None = None, extra: Any = ()
) -> dict[str, Any]:
    """Settings of an engine with a ``KVTransferConfig`` of its own, which may name what is in these tests."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {
        "role": None,
        "extra": ("--kv-transfer-config", json.dumps(config), *extra),
        "environment": {**(environment or {}), "PYTHONPATH": path},
    }


def _files() -> dict[str, Any]:
    """vLLM's example connector, with files of its own for each engine."""
    _directories.append(tempfile.TemporaryDirectory(prefix="kvferry-example-"))
    where = {"shared_storage_path": _directories[-1].name}
    return {"kv_connector": "ExampleConnector", "kv_connector_extra_config": where}


_directories: list[tempfile.TemporaryDirectory[str]] = []  # until the tests end


def _guessing(method: str, **more: Any) -> dict[str, Any]:
    config = {"method": method, "num_speculative_tokens": 3, **more}
    return {"extra": ("--speculative-config", json.dumps(config))}


def _guessing_states(method: str, **more: Any) -> dict[str, Any]:
    """Without prefix caching: the kernel that copies states of guesses between blocks wants Triton."""
    settings = _guessing(method, **more)
    return {"dtype": "bfloat16", "extra": ("--no-enable-prefix-caching", *settings["extra"])}


ROOT = Path(__file__).parents[2]
FERRY = {"kv_connector": CONNECTOR, "kv_connector_extra_config": dict(CPU_PATIENCE)}
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": 64 << 20,
        "spec_module_path": "tests.engines.offloading",
        "spec_name": "CopyingSpec",
    },
}

VARIANTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "": lambda _: {},
    "recompute": lambda port: _faults("recompute", port),
    "fail": lambda port: _faults("fail", port),
    "small-blocks": lambda port: _faults("recompute", port, "--block-size", "64"),
    "tight": lambda _: {
        "extra": (
            *("--num-gpu-blocks-override", "18", "--max-num-batched-tokens", "256", "--async-scheduling"),
            "--no-scheduler-reserve-full-isl",  # else no prefill starts that may have to be preempted
        ),
        "connector_config": {"kv_lease_duration": 30, "claim_timeout": 5, "streaming": True},
        "kv_load_failure_policy": "recompute",
        "environment": {"KVFERRY_SECRET": "known to engines with few blocks only"},
    },
    # The CPU build's Mamba 2 kernel cannot export the states between chunks that prefix caching wants.
    "uncached": lambda _: {"extra": ("--no-enable-prefix-caching",)},
    "streaming": lambda _: {
        "extra": ("--num-gpu-blocks-override", "64", "--max-num-batched-tokens", "256"),
        "connector_config": {"kv_lease_duration": 30, "claim_timeout": 30, "streaming": True},
        "kv_load_failure_policy": "recompute",
        "environment": {"KVFERRY_SECRET": "known to engines that stream only"},
    },
    # With the model itself as its drafter: each guess is right exactly where the drafter's cache is.
    "drafted": lambda _: _guessing("draft_model", model=str(tiny("qwen2"))),
    "eagle": lambda _: _guessing("eagle", model=str(eagle("llama"))),
    "mtp": lambda _: _guessing("mtp"),
    "states-mtp": lambda _: _guessing_states("mtp"),
    # At prefill only: after a step of fewer guesses than there may be, a plain engine goes on from wrong inputs.
    "states-ngram": lambda _: _guessing_states("ngram", num_speculative_tokens=2, prompt_lookup_max=3),
    "fp8": lambda _: {"extra": ("--kv-cache-dtype", "fp8")},
    "bfloat16-small-blocks": lambda _: {"dtype": "bfloat16", "extra": ("--block-size", "32")},
    "staged": lambda _: _staged({}),
    "staged-tight": lambda port: _staged(VARIANTS["tight"](port)),
    "ferry-first": lambda _: _beside(FERRY, OFFLOADING),
    "offloading-first": lambda _: _beside(OFFLOADING, FERRY),
    "ferry-before-files": lambda _: _beside(FERRY, _files()),
    "files-before-ferry": lambda _: _beside(_files(), FERRY),
    # The CPU build's kernel for mixtures of experts refuses float32.
    "bfloat16": lambda _: {"dtype": "bfloat16"},
    "traced": lambda port: {
        "extra": ("--otlp-traces-endpoint", f"http://127.0.0.1:{port}/v1/traces"),
        "environment": {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "200"},
    },
}
LINES_OF_A_LOG = 12  # shown of each engine when a test has failed
SUMMARY = pytest.StashKey[str]()


@dataclass
class Instance:
    """A running engine, and the log of what its workers loaded."""

    spec: InstanceSpec
    transfer_log: Path
    supervisor: Supervisor

    @property
    def url(self) -> str:
        return self.spec.url

    @property
    def managed(self) -> Managed:
        """Its processes, and their log."""
        return self.supervisor.managed(self.spec.name)


@dataclass(frozen=True)
class Key:
    """Which engine is wanted: a tiny model, a layout, a kv_role, one of several alike, and settings of ``VARIANTS``."""

    kind: str
    layout: str
    role: str | None
    copy: int = 0
    variant: str = ""


@dataclass
class Fleet:
    """Starts one engine per key and reuses it; the least recently used one makes room."""

    supervisor: Supervisor
    dispatcher: Dispatcher
    directory: Path
    starts: int = 0
    start_seconds: float = 0.0
    _running: dict[Key, Instance] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def plain(self, kind: str) -> Instance:
        """An engine without a connector."""
        [instance] = self.instances(Key(kind, "tp=1", None))
        return instance

    def pair(self, kind: str, prefill: str, decode: str) -> tuple[Instance, Instance]:
        """Two engines with the connector; two of them also where the layouts are the same."""
        copy = 1 if prefill == decode else 0
        first, second = self.instances(Key(kind, prefill, "kv_both"), Key(kind, decode, "kv_both", copy))
        return first, second

    def instances(self, *keys: Key) -> list[Instance]:
        """All of them, running at once; one that has ended is started anew."""
        for key in [key for key in keys if key in self._running and not self._running[key].managed.running]:
            self.supervisor.stop(self._running.pop(key).spec.name)
        missing = [key for key in keys if key not in self._running]
        if missing:
            self._make_room(missing, keys)
            self._start(missing)
        for key in keys:
            self._running[key] = self._running.pop(key)  # most recently used last
        return [self._running[key] for key in keys]

    def ends_of_logs(self) -> str:
        """The last lines of every running engine's log."""
        return "\n".join(
            f"== {instance.spec.name}\n" + "\n".join(instance.managed.log.read_text().splitlines()[-LINES_OF_A_LOG:])
            for instance in self._running.values()
        )

    def restart(self, instance: Instance) -> None:
        """End what is left of an engine, and start it again on its port."""
        self.supervisor.stop(instance.spec.name)
        self._launch([instance.spec])

    def _make_room(self, missing: Sequence[Key], keep: Sequence[Key]) -> None:
        wanted = sum(Layout.parse(key.layout).workers for key in missing)
        for key in list(self._running):
            if wanted + self._workers() <= MOST_WORKERS:
                return
            if key not in keep:
                self.supervisor.stop(self._running.pop(key).spec.name)

    def _workers(self) -> int:
        return sum(instance.spec.layout.workers for instance in self._running.values())

    def _start(self, keys: Sequence[Key]) -> None:
        instances = {key: self._prepare(key) for key in keys}
        self._launch([instance.spec for instance in instances.values()])
        self._running.update(instances)

    def _launch(self, specs: Sequence[InstanceSpec]) -> None:
        begin = time.monotonic()
        start_instances(self.supervisor, specs, cpu_build_installed(), lambda *_: None, START_DEADLINE_S)
        for spec in specs:
            self._warm_up(spec)
        self.starts += len(specs)
        self.start_seconds += time.monotonic() - begin

    def _prepare(self, key: Key) -> Instance:
        layout = Layout.parse(key.layout)
        parts = [key.kind, layout.label, key.role or "plain", str(key.copy), key.variant]
        name = "-".join([f"{next(self._numbers):02d}", *filter(None, parts)])
        log = self.directory / f"{name}.jsonl"
        port, side_channel_port = free_ports(2)
        spec = InstanceSpec(name, tiny(key.kind), layout, port, key.role, kv_cache_bytes=CACHE_BYTES)
        spec = replace(spec, **VARIANTS[key.variant](side_channel_port))
        spec = logging_transfers(replace(spec, extra=("--enable-prompt-tokens-details", *spec.extra)), log)
        return Instance(spec, log, self.supervisor)

    def _warm_up(self, spec: InstanceSpec) -> None:
        # Some functions are compiled at the first request that needs them, which takes seconds.
        for rank in range(spec.layout.dp):
            self.dispatcher.complete(spec.url, [7, 9, 11], rank=rank if spec.layout.dp > 1 else None)


@pytest.fixture(scope="package")
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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    fleet = getattr(item, "funcargs", {}).get("fleet")
    if report.when == "call" and report.failed and fleet is not None:
        report.sections.append(("ends of the engines' logs", fleet.ends_of_logs()))
    return report
