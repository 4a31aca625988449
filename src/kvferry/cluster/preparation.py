"""Everything of a cluster that can be decided, and refused, before anything is started."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.cluster.allocation import Allocator, Front, Member
from kvferry.cluster.launch import router_binary
from kvferry.cluster.machine import Machine, model_directory, this_machine
from kvferry.cluster.manifest import Manifest, Router
from kvferry.cluster.ports import PortChooser
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


def prepare(
    manifest: Manifest, state: StateDirectory, machine: Machine | None = None, fresh_secret: Path | None = None
) -> Prepared:
    """Give out devices and ports, beside the clusters that run already.

    `fresh_secret` is the file with the secret where the manifest names none; None for one in the environment.

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
        _secret(manifest) or fresh_secret,
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
