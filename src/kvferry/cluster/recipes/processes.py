"""What every form of a recipe is made from: the processes of a prepared cluster, as `kvferry up` would start them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvferry.cluster.allocation import Member
from kvferry.cluster.commands import OWN_VARIABLES, engine_command, engine_environment
from kvferry.cluster.fleet import ENGINE_GRACE_S
from kvferry.cluster.launch import GATEWAY, PROXIES, ROUTER, ROUTER_DEADLINE_S, router_binary, router_environment
from kvferry.cluster.manifest import Role, Router
from kvferry.cluster.preparation import Prepared
from kvferry.cluster.session import FRONT_GRACE_S, front_command


@dataclass(frozen=True)
class Process:
    """One process of a cluster.

    Attributes:
        role: None for what serves the one URL.
        title: what it is, for people.
        environment: all that it must have.
        without: variables that it must not inherit.
        ready_url: answers 200 once it can be used.
        start_s, stop_s: how long it may take to begin, and to end once it is asked to.
    """

    name: str
    role: Role | None
    title: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    without: tuple[str, ...]
    ready_url: str
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class Recipe:
    """A whole cluster.

    Attributes:
        directory: where the files of the recipe will be; absolute.
        secret_file: what the manifest names; where it names none, the processes get ``KVFERRY_SECRET``.
        admin_key: the file with the key of the gateway's ``/admin``; None where there is no gateway.
        model: its directory.
        cpu: whether vLLM runs on processors.
    """

    cluster: str
    served_name: str
    url: str
    directory: Path
    secret_file: Path | None
    admin_key: Path | None
    model: Path
    cpu: bool
    instances: tuple[Process, ...]
    front: Process

    @property
    def processes(self) -> tuple[Process, ...]:
        """All, what serves the one URL last."""
        return (*self.instances, self.front)

    def of(self, role: Role) -> list[Process]:
        return [one for one in self.instances if one.role is role]


def recipe(prepared: Prepared, directory: Path, admin_key: Path, base: Mapping[str, str]) -> Recipe:
    """The processes of a cluster; `base` is the environment that theirs is added to."""
    allocator = prepared.allocator
    return Recipe(
        allocator.manifest.name,
        allocator.manifest.served_name,
        prepared.front.url,
        directory,
        allocator.secret,
        admin_key if allocator.manifest.router is Router.GATEWAY else None,
        allocator.model,
        allocator.machine.cpu,
        tuple(_instance(prepared, member, base) for member in prepared.members),
        _front(prepared, admin_key, base),
    )


def _instance(prepared: Prepared, member: Member, base: Mapping[str, str]) -> Process:
    machine = prepared.allocator.machine
    where = f"on {machine.kind} {', '.join(member.devices)}" if member.devices else "on all cores"
    environment = engine_environment(member.spec, base, machine.cpu)
    return Process(
        member.name,
        member.role,
        f"{member.spec.layout}, {where}",
        tuple(engine_command(member.spec, machine.cpu)),
        environment,
        tuple(name for name in OWN_VARIABLES if name not in environment),
        f"{member.spec.url}/health",
        prepared.allocator.manifest.start_timeout,
        ENGINE_GRACE_S,
    )


def _front(prepared: Prepared, admin_key: Path, base: Mapping[str, str]) -> Process:
    router = prepared.allocator.manifest.router is Router.VLLM_ROUTER
    binary = router_binary() if router else ""
    environment = router_environment(base) if router else dict(base)
    return Process(
        ROUTER if router else GATEWAY,
        None,
        prepared.front.url,
        tuple(front_command(prepared.allocator, prepared.front, admin_key, prepared.members, binary)),
        environment,
        PROXIES if router else (),
        f"{prepared.front.url}/{'health' if router else 'ready'}",
        ROUTER_DEADLINE_S,
        FRONT_GRACE_S,
    )
