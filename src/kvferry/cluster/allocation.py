"""From what a cluster is to be to what is started: devices, ports and settings of every instance.

Nothing here has effects but asking which ports are free.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry.cluster import flags
from kvferry.cluster.flags import Flags
from kvferry.cluster.machine import Machine
from kvferry.cluster.manifest import Manifest, Role, Router, instance_name
from kvferry.cluster.ports import PortChooser
from kvferry.cluster.spec import InstanceSpec, Layout, kv_bytes_per_token, layout_reasons, reachable
from kvferry.errors import SpecError

USUAL_PORT = 8080
KV_ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}
# An engine on CPU is for trying things out: what it reserves is bounded, unless vLLM's own flags say otherwise.
CPU_MODEL_LEN = 2048
CPU_SEQUENCES = 8
CPU_CACHE_TOKENS = 4096
CPU_CACHE_BYTES = 64 << 20
BOUNDS = ("max_model_len", "max_num_seqs", "kv_cache_bytes")
_DTYPES = {"float": "float32", "half": "float16"}


@dataclass(frozen=True)
class Member:
    """One instance of a cluster.

    Attributes:
        devices: GPU ids, or cores; of cores none where the instance shares all of them with others.
        side_channel_port: the first of as many as it has data parallel ranks.
    """

    role: Role
    index: int
    spec: InstanceSpec
    devices: tuple[str, ...]
    side_channel_port: int

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def ports(self) -> set[int]:
        """Every port that it binds at a number known beforehand."""
        first = self.side_channel_port
        return {self.spec.port, *range(first, first + self.spec.layout.dp)}


@dataclass(frozen=True)
class Front:
    """The one URL; `metrics_port` is vllm-router's."""

    host: str
    port: int
    metrics_port: int = 0

    @property
    def url(self) -> str:
        return f"http://{reachable(self.host)}:{self.port}"


@dataclass
class Allocator:
    """Gives out what the machine has.

    Attributes:
        model: its directory.
        config: the text part of its ``config.json``.
        secret: the file with the secret; None where instances get it in their environment.
        ports: chooses free ones.
        elsewhere: devices that other clusters hold.
    """

    manifest: Manifest
    machine: Machine
    model: Path
    config: Mapping[str, Any]
    secret: Path | None
    ports: PortChooser = field(default_factory=PortChooser)
    elsewhere: frozenset[str] = frozenset()

    def front(self) -> Front:
        """Raises:
        PortInUseError: the port that was asked for is taken.
        """
        manifest = self.manifest
        if manifest.port is not None:
            port = self.ports.require(manifest.port, manifest.host)
        else:
            port = self.ports.prefer(USUAL_PORT, manifest.host)
        return Front(manifest.host, port, self.ports.run() if manifest.router is Router.VLLM_ROUTER else 0)

    def all_members(self) -> list[Member]:
        """The members that the manifest names.

        Raises:
            SpecError: the model cannot be split that way, or there are too few devices.
            PortInUseError: a port that was asked for is taken.
        """
        sides = [(role, range(self.manifest.side(role).replicas)) for role in Role]
        return self.members([(role, index) for role, indices in sides for index in indices], ())

    def members(self, wanted: Sequence[tuple[Role, int]], running: Collection[Member]) -> list[Member]:
        """Further members beside the `running` ones.

        Raises:
            SpecError: the model cannot be split that way, or there are too few devices.
            PortInUseError: a port that was asked for is taken.
        """
        needs = [self._need(role, index) for role, index in wanted]
        held = {device for member in running for device in member.devices}
        if self.machine.cpu and not all(member.devices for member in running):
            held = set(self.machine.devices)  # some share all cores, so none is left for one instance alone
        shares = share_devices(needs, self.machine, self.manifest.devices, held | self.elsewhere)
        return [self._member(*key, shares[need.name]) for key, need in zip(wanted, needs, strict=True)]

    def _need(self, role: Role, index: int) -> "Need":
        layout = self.manifest.layout(role, index)
        if reasons := layout_reasons(layout, dict(self.config)):
            raise SpecError(f"{role}: {layout} does not fit the model: {'; '.join(reasons)}")
        if self.machine.cpu and max(layout.pcp, layout.dcp) > 1:
            raise SpecError(f"{role}: {layout} needs GPUs: vLLM's CPU build runs no context parallelism (pcp, dcp)")
        explicit = self.manifest.override(role, index).devices
        return Need(instance_name(role, index), layout.workers, None if explicit is None else _texts(explicit))

    def _member(self, role: Role, index: int, devices: tuple[str, ...]) -> Member:
        layout, own = self.manifest.layout(role, index), self.manifest.override(role, index)
        host = self.manifest.instance_host
        port = self.ports.run() if own.port is None else self.ports.require(own.port, host)
        side_channel = own.side_channel_port or self.ports.run(layout.dp)
        if own.side_channel_port is not None:
            for each in range(side_channel, side_channel + layout.dp):
                self.ports.require(each)
        spec = InstanceSpec(
            instance_name(role, index),
            self.model,
            layout,
            port,
            KV_ROLES[role],
            served_name=self.manifest.served_name,
            connector_config=self._connector(role, index, side_channel),
            kv_load_failure_policy="recompute",
            environment={**self._binding(devices, layout), **self.manifest.environment_of(role, index)},
            host=host,
            **engine_settings(self.manifest.flags(role, index), self.config, self.machine.cpu),
        )
        return Member(role, index, spec, devices, side_channel)

    def _connector(self, role: Role, index: int, side_channel_port: int) -> dict[str, Any]:
        host = self.manifest.instance_host
        address = {"side_channel_host": host} if reachable(host) == host else {}
        secret = {} if self.secret is None else {"secret_file": str(self.secret)}
        settings = {**address, "side_channel_port": side_channel_port, **secret}
        return {**settings, **self.manifest.connector_config(role, index)}

    def _binding(self, devices: tuple[str, ...], layout: Layout) -> dict[str, str]:
        if not self.machine.cpu:
            return {"CUDA_VISIBLE_DEVICES": ",".join(devices)}
        host = self.manifest.instance_host
        address = {} if reachable(host) != host else {"VLLM_HOST_IP": host}
        if not devices:
            return address
        each = len(devices) // layout.workers
        workers = [devices[at : at + each] for at in range(0, each * layout.workers, each)]
        cores = "|".join(",".join(worker) for worker in workers)
        return {**address, "VLLM_CPU_OMP_THREADS_BIND": cores, "OMP_NUM_THREADS": str(each)}


@dataclass(frozen=True)
class Need:
    """How many workers an instance has, and the devices that the manifest gives it, if it does."""

    name: str
    workers: int
    explicit: tuple[str, ...] | None = None


def share_devices(
    needs: Sequence[Need], machine: Machine, allowed: Sequence[int | str] | None, held: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """Devices for each of the instances.

    A worker has a GPU of its own. Cores are dealt out evenly where there are more than workers, and shared by all where
    there are not; an instance that shares them is given none.

    Raises:
        SpecError: a device that is not there, that is given twice or held by others, or too few of them.
    """
    pool = _pool(machine, allowed)
    shares = {need.name: _explicit(need, machine, held) for need in needs if need.explicit is not None}
    given = [device for share in shares.values() for device in share]
    if repeated := {device for device in given if given.count(device) > 1}:
        raise SpecError(f"{_listed(repeated)} of the {machine.kind} are given to several instances")
    free = [device for device in pool if device not in held and device not in given]
    open_needs = [need for need in needs if need.explicit is None]
    each = _devices_per_worker(open_needs, free, machine)
    for need in open_needs:
        shares[need.name], free = tuple(free[: each * need.workers]), free[each * need.workers :]
    return shares


def _pool(machine: Machine, allowed: Sequence[int | str] | None) -> list[str]:
    if allowed is None:
        return list(machine.devices)
    chosen = _texts(allowed)
    # Where no GPU was found nothing is known of them, and what is said has to be believed.
    if machine.devices and (missing := set(chosen) - set(machine.devices)):
        raise SpecError(f"devices: {_listed(missing)} are not among the {machine.kind} {_listed(machine.devices)}")
    return list(dict.fromkeys(chosen))


def _explicit(need: Need, machine: Machine, held: Collection[str]) -> tuple[str, ...]:
    devices = need.explicit or ()
    where = f"instances.{need.name}.devices"
    fits = len(devices) == need.workers or (machine.cpu and devices and len(devices) % need.workers == 0)
    if not fits:
        raise SpecError(f"{where}: {len(devices)} {machine.kind} for {need.workers} workers")
    if machine.devices and (missing := set(devices) - set(machine.devices)):
        raise SpecError(f"{where}: {_listed(missing)} are not among the {machine.kind} {_listed(machine.devices)}")
    if not machine.cpu and (others := set(devices) & set(held)):
        raise SpecError(f"{where}: {_listed(others)} are in use by other instances")
    return devices


def _devices_per_worker(needs: Sequence[Need], free: Sequence[str], machine: Machine) -> int:
    workers = sum(need.workers for need in needs)
    if machine.cpu:
        # One core more than workers, so that what is no worker has one too.
        return len(free) // workers if workers and len(free) > workers else 0
    if workers > len(free):
        parts = ", ".join(f"{need.name} {need.workers}" for need in needs)
        here = f"{len(free)} of {len(machine.devices)} are free" if machine.devices else "none was found"
        raise SpecError(f"{workers} GPUs are needed ({parts}), but {here}; fewer replicas or smaller layouts fit")
    return 1


def engine_settings(given: Flags, config: Mapping[str, Any], cpu: bool) -> dict[str, Any]:
    """The fields of an `InstanceSpec` that vLLM's flags decide; flags that are no fields stay flags."""
    unset: dict[str, Any] = dict.fromkeys(("dtype", *BOUNDS))
    if not cpu:
        return {**unset, "extra": flags.to_arguments(given)}
    dtype = flags.value_of(given, ["--dtype"]) or config.get("dtype") or config.get("torch_dtype")
    dtype = _DTYPES.get(str(dtype), str(dtype))
    defaults = {
        "--max-model-len": min(CPU_MODEL_LEN, config.get("max_position_embeddings", CPU_MODEL_LEN)),
        "--max-num-seqs": CPU_SEQUENCES,
        "--kv-cache-memory-bytes": _cache_bytes(given, dict(config), dtype),
    }
    chosen = {
        field: default for field, (flag, default) in zip(BOUNDS, defaults.items(), strict=True) if flag not in given
    }
    # float32 goes through the spec: for some models a further flag follows from it.
    extra = {flag: values for flag, values in given.items() if (flag, dtype) != ("--dtype", "float32")}
    return {**unset, **chosen, "dtype": "float32" if dtype == "float32" else None, "extra": flags.to_arguments(extra)}


def _cache_bytes(given: Flags, config: dict[str, Any], dtype: str) -> int:
    longest = flags.value_of(given, ["--max-model-len"]) or ""
    tokens = max(CPU_CACHE_TOKENS, 2 * int(longest) if longest.isdigit() else 0)
    return max(CPU_CACHE_BYTES, tokens * kv_bytes_per_token(config, dtype))


def _texts(devices: Iterable[int | str]) -> tuple[str, ...]:
    return tuple(map(str, devices))


def _listed(devices: Iterable[str]) -> str:
    return ", ".join(sorted(devices, key=lambda device: (len(device), device)))
