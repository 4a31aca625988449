"""Everything of a cluster that can be decided, and refused, before anything is started."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.cluster.allocation import Allocator, Front, Member
from kvferry.cluster.commands import engine_command, engine_environment
from kvferry.cluster.launch import GATEWAY, ROUTER, router_binary, router_environment
from kvferry.cluster.machine import Machine, model_directory, this_machine
from kvferry.cluster.manifest import Manifest, Router
from kvferry.cluster.ports import PortChooser
from kvferry.cluster.script import block, keys_command, script, shell_command
from kvferry.cluster.session import front_command
from kvferry.cluster.spec import read_model_config
from kvferry.cluster.state import StateDirectory, running_clusters
from kvferry.errors import SettingsError, SpecError


@dataclass(frozen=True)
class Prepared:
    """A cluster whose devices and ports are given out."""

    allocator: Allocator
    members: Sequence[Member]
    front: Front

    @property
    def ports(self) -> tuple[int, ...]:
        ports = {self.front.port, self.front.metrics_port}.union(*(member.ports for member in self.members))
        return tuple(sorted(ports - {0}))

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(device for member in self.members for device in member.devices)


def prepare(manifest: Manifest, state: StateDirectory, machine: Machine | None = None) -> Prepared:
    """Give out devices and ports, beside the clusters that run already.

    Raises:
        SpecError: a missing model, a layout that does not fit it, too few devices, a secret that cannot be used.
        PortInUseError: a port that was asked for is taken.
        StartError: vllm-router is wanted and not installed.
    """
    model = model_directory(manifest.model)
    others = [other.record() for other in running_clusters(state.root) if other.name != state.name]
    allocator = Allocator(
        manifest,
        machine or this_machine(),
        model,
        read_model_config(model),
        _secret(manifest) or state.secret,
        PortChooser(port for record in others for port in record.ports),
        frozenset(device for record in others for device in record.devices),
    )
    if manifest.router is Router.VLLM_ROUTER:
        router_binary()
    return Prepared(allocator, allocator.all_members(), allocator.front())


def _secret(manifest: Manifest) -> Path | None:
    if manifest.secret_file is None:
        return None
    from kvferry.vllm.settings import parse_settings, read_seal

    path = Path(manifest.secret_file).expanduser().absolute()
    try:
        read_seal(parse_settings({"secret_file": str(path)}))
    except SettingsError as error:
        raise SpecError(str(error)) from error
    return path


def as_script(prepared: Prepared, state: StateDirectory) -> str:
    """The commands and environments that `prepared` would be started with, for a shell."""
    allocator, inherited = prepared.allocator, os.environ
    cpu = allocator.machine.cpu
    keys = [path for path in (allocator.secret, state.admin_key) if path.parent == state.path]
    blocks = [block("the secret of the instances, and the key of the gateway's /admin", keys_command(keys))]
    for member in prepared.members:
        where = f"on {allocator.machine.kind} {', '.join(member.devices)}" if member.devices else "on all cores"
        command = shell_command(engine_command(member.spec, cpu), _environment(member, cpu), inherited)
        blocks.append(block(f"{member.name}: {member.spec.layout}, {where}", command))
    router = allocator.manifest.router is Router.VLLM_ROUTER
    binary = router_binary() if router else ""
    front = front_command(allocator, prepared.front, state, prepared.members, binary)
    environment = router_environment(inherited) if router else dict(inherited)
    title = f"{ROUTER if router else GATEWAY}: {prepared.front.url}"
    return script([*blocks, block(title, shell_command(front, environment, inherited))])


def _environment(member: Member, cpu: bool) -> dict[str, str]:
    return engine_environment(member.spec, os.environ, cpu)
