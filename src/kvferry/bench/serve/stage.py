"""One contender's processes, started for its turn."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from kvferry.bench.serve.client import MODEL, Target
from kvferry.bench.serve.contenders import Contender, Front, Side, filled, port_names
from kvferry.bench.serve.question import Question
from kvferry.cluster.allocation import Need, share_devices
from kvferry.cluster.commands import cpu_build_installed
from kvferry.cluster.launch import start_gateway, start_instances, start_router, start_spreading
from kvferry.cluster.machine import this_machine
from kvferry.cluster.ports import PortChooser
from kvferry.cluster.spec import InstanceSpec, Layout
from kvferry.cluster.supervisor import Supervisor
from kvferry.errors import StartError

Say = Callable[[str], None]
PROBE_S = 60.0
BOOTSTRAP = "port:bootstrap"
"""Of Mooncake's prefill engine, which vllm-router has to be told."""


class MissingError(StartError):
    """A package that a contender needs is not installed."""


class Stage:
    """Starts a contender's processes; its supervisor ends them.

    Attributes:
        engines: URLs of all engines by name.
        exporters: URLs of all processes with metrics, by name.
    """

    def __init__(self, question: Question, contender: Contender, supervisor: Supervisor, directory: Path) -> None:
        self._question, self._supervisor = question, supervisor
        self._ports = PortChooser()
        self._given = {f"port:{name}": self._ports.run() for name in port_names(contender)}
        python = contender.python or sys.executable
        values: dict[str, str | int] = {**self._given, "directory": str(directory), "bin": str(Path(python).parent)}
        self.contender = filled(contender, values)
        self._python = python
        self.engines: dict[str, str] = {}
        self.exporters: dict[str, str] = {}

    def start(self, say: Say) -> Target:
        """Raises:
        MissingError: something is not installed.
        StartError: a process did not start.
        """
        self._require_installed()
        if self.contender.front is Front.STREAMING and not self._question.own_front:
            raise StartError("vllm-router sends one leg after the other, so there is nothing to measure")
        for number, command in enumerate(self.contender.servers):
            self._supervisor.start(f"server-{number}", command, {**os.environ, **self.contender.decode.environment})
        specs = self._specs()
        say(f"starting {', '.join(spec.name for spec in specs)}")
        start_instances(
            self._supervisor,
            specs,
            cpu_build_installed(),
            lambda name, waited: say(f"waiting for {name}, {waited:.0f} s"),
            self._question.start_s,
            self._python,
        )
        self.engines = {spec.name: spec.url for spec in specs}
        self.exporters = dict(self.engines)
        return self._start_front(specs)

    def _require_installed(self) -> None:
        wanted = ", ".join(map(repr, self.contender.needs))
        program = f"import importlib.util as u; print(*[n for n in [{wanted}] if u.find_spec(n) is None])"
        with tempfile.TemporaryDirectory() as elsewhere:
            done = subprocess.run(
                [self._python, "-c", program], capture_output=True, text=True, timeout=PROBE_S, cwd=elsewhere
            )
        if done.returncode != 0:
            raise MissingError(f"{self._python} does not run: {done.stderr.strip().splitlines()[-1:]}")
        if missing := done.stdout.split():
            raise MissingError(f"{', '.join(missing)} is not installed; --python NAME=INTERPRETER names an environment")

    def _specs(self) -> list[InstanceSpec]:
        asked, front = self._question, self.contender.front
        named = {"prefill": (asked.prefill, self.contender.prefill), "decode": (asked.decode, self.contender.decode)}
        if front is Front.DIRECT:
            named = {"engine": (asked.decode, self.contender.decode)}
        elif front is Front.ROUND_ROBIN:
            named = {"engine-0": (asked.prefill, self.contender.prefill), "engine-1": named["decode"]}
        devices = self._devices({name: layout for name, (layout, _) in named.items()})
        specs = [self._spec(name, layout, side, devices[name]) for name, (layout, side) in named.items()]
        if not asked.pinned:
            return specs
        shares = shared_cores(sorted(os.sched_getaffinity(0)), len(specs))
        return [replace(spec, cores=share) for spec, share in zip(specs, shares, strict=True)]

    def _devices(self, layouts: dict[str, Layout]) -> dict[str, dict[str, str]]:
        """Variables that give each engine cards of its own; on CPU all engines share all cores."""
        machine = this_machine()
        if machine.cpu:
            return {name: {} for name in layouts}
        shares = share_devices([Need(name, layout.workers) for name, layout in layouts.items()], machine, None, ())
        return {name: {"CUDA_VISIBLE_DEVICES": ",".join(share)} for name, share in shares.items()}

    def _spec(self, name: str, layout: Layout, side: Side, devices: dict[str, str]) -> InstanceSpec:
        asked = self._question
        # So that the same prompt is fetched, or computed, as often as it is sent.
        extra = ["--no-enable-prefix-caching"] if asked.stall is not None and name != "prefill" else []
        extra += side.arguments
        if side.kv_transfer_config:
            extra += ["--kv-transfer-config", msgspec.json.encode(side.kv_transfer_config).decode()]
        return InstanceSpec(
            name,
            asked.model,
            layout,
            self._ports.run(),
            served_name=MODEL,
            dtype=asked.dtype,
            max_model_len=asked.longest,
            max_num_seqs=asked.sequences,
            kv_cache_bytes=asked.cache_bytes if cpu_build_installed() else None,
            extra=tuple(extra),
            environment={**devices, **side.environment},
        )

    def _start_front(self, specs: list[InstanceSpec]) -> Target:
        front, ports = self.contender.front, (self._ports.run(), self._ports.run())
        if front in (Front.GATEWAY, Front.STREAMING) and self._question.own_front:
            options = ["--no-access-log", *(["--streaming"] if front is Front.STREAMING else [])]
            url = start_gateway(self._supervisor, specs[:1], specs[1:], ports[0], _quiet, options)
            self.exporters["gateway"] = url
            return Target(url)
        match front:
            case Front.DIRECT:
                return Target(specs[0].url)
            case Front.CLIENT:
                return Target(specs[1].url, specs[0].url)
            case Front.ROUND_ROBIN:
                return Target(start_spreading(self._supervisor, specs, ports, _quiet))
        bootstrap = int(self._given[BOOTSTRAP]) if front is Front.ROUTER_MOONCAKE else None
        return Target(start_router(self._supervisor, specs[0], specs[1], ports, _quiet, bootstrap))


def shared_cores(cores: Sequence[int], engines: int) -> list[tuple[int, ...]]:
    """Cores for each of several engines, as many for one as for another.

    Raises:
        StartError: there is not one for each.
    """
    each = len(cores) // engines
    if not each:
        raise StartError(f"--pin: {engines} engines cannot each have one of {len(cores)} cores to itself")
    return [tuple(cores[at * each : (at + 1) * each]) for at in range(engines)]


def _quiet(_name: str, _waited: float) -> None:
    pass
