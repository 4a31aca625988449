"""Starts the instances and the router of a cluster under a supervisor."""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kvferry.cluster.commands import (
    engine_command,
    engine_environment,
    gateway_command,
    router_command,
    spreading_command,
)
from kvferry.cluster.ports import require_free
from kvferry.cluster.spec import InstanceSpec
from kvferry.cluster.supervisor import Progress, Supervisor
from kvferry.cluster.transfers import VARIABLE as TRANSFER_LOG
from kvferry.errors import StartError

START_DEADLINE_S = 300.0
ROUTER_DEADLINE_S = 60.0
ROUTER = "vllm-router"
PROXIES = ("ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "all_proxy", "http_proxy", "https_proxy")
GATEWAY = "gateway"


def start_instances(
    supervisor: Supervisor,
    specs: Sequence[InstanceSpec],
    cpu: bool,
    progress: Progress,
    deadline_s: float = START_DEADLINE_S,
    python: str = sys.executable,
) -> None:
    """Start instances side by side, with the interpreter `python`, and wait until all of them answer.

    Raises:
        PortInUseError: before anything is started, a port is taken.
        StartError: an instance ended, or did not answer within `deadline_s` seconds.
    """
    for spec in specs:
        require_free(spec.port)
    for spec in specs:
        command = engine_command(spec, cpu, python)
        supervisor.start(spec.name, command, engine_environment(spec, os.environ, cpu))
    supervisor.wait_ready({spec.name: f"{spec.url}/health" for spec in specs}, deadline_s, progress)


def start_router(
    supervisor: Supervisor,
    prefill: InstanceSpec,
    decode: InstanceSpec,
    ports: tuple[int, int],
    progress: Progress,
    bootstrap: int | None = None,
) -> str:
    """Start vllm-router in front of two ready instances; `ports` are its own and that of its metrics.

    Returns its URL. With Mooncake's `bootstrap` port of the prefill instance it speaks Mooncake's parameters.

    Raises:
        PortInUseError: one of the ports is taken.
        StartError: it is not installed, or did not start.
    """
    command = router_command([prefill.url], [decode.url], *ports, binary=router_binary(), bootstrap=bootstrap)
    return _start_router(supervisor, command, ports, progress)


def start_spreading(
    supervisor: Supervisor, instances: Sequence[InstanceSpec], ports: tuple[int, int], progress: Progress
) -> str:
    """Start vllm-router in front of ready instances that each do everything; raises and returns as ``start_router``."""
    command = spreading_command([spec.url for spec in instances], *ports, binary=router_binary())
    return _start_router(supervisor, command, ports, progress)


def _start_router(supervisor: Supervisor, command: Sequence[str], ports: tuple[int, int], progress: Progress) -> str:
    for port in ports:
        require_free(port)
    supervisor.start(ROUTER, command, router_environment(os.environ))
    url = f"http://127.0.0.1:{ports[0]}"
    supervisor.wait_ready({ROUTER: f"{url}/health"}, ROUTER_DEADLINE_S, progress)
    return url


def start_gateway(
    supervisor: Supervisor,
    prefill: Sequence[InstanceSpec],
    decode: Sequence[InstanceSpec],
    port: int,
    progress: Progress,
    options: Sequence[str] = (),
) -> str:
    """Start the gateway in front of ready instances, with further options of ``kvferry gateway``; returns its URL.

    Raises:
        PortInUseError: the port is taken.
        StartError: it did not start.
    """
    require_free(port)
    command = gateway_command([spec.url for spec in prefill], [spec.url for spec in decode], port, options)
    supervisor.start(GATEWAY, command, os.environ)
    url = f"http://127.0.0.1:{port}"
    supervisor.wait_ready({GATEWAY: f"{url}/ready"}, ROUTER_DEADLINE_S, progress)
    return url


def router_binary() -> str:
    """vllm-router of this Python environment, else of PATH.

    Raises:
        StartError: there is none.
    """
    beside = Path(sys.executable).parent / ROUTER
    if beside.is_file():
        return str(beside)
    if found := shutil.which(ROUTER):
        return found
    raise StartError(f"{ROUTER} is not installed; pip install 'kvferry[dev]' brings it")


def router_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Without proxies, which vllm-router would ask for its way to the instances."""
    return {name: value for name, value in base.items() if name not in PROXIES}


def logging_transfers(spec: InstanceSpec, log: Path) -> InstanceSpec:
    """The instance, told to write what its workers load into `log`."""
    return replace(spec, environment={**spec.environment, TRANSFER_LOG: str(log)})
