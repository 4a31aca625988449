"""A cluster as a docker compose file: a service for each process, started in order of their health."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvferry.cluster.recipes.keys import SECRET_ENV
from kvferry.cluster.recipes.processes import Process, Recipe

FILE = "compose.yaml"
PYTHON = "python3"
HEAD = """\
# The cluster {cluster}, which serves {model} on {url}.
# Written by `kvferry render compose`; edit it as you like.
#
#   docker compose up --wait      starts it, and returns when it serves
#   docker compose logs --follow
#   docker compose down           stops the {front} first, which lets requests under way finish, then the instances
#
# KVFERRY_IMAGE names an image with vLLM, NIXL and KVFerry, such as one made from
#   FROM vllm/vllm-openai:v0.32.0
#   RUN pip install kvferry nixl
#
# Containers share the network, the process ids and the shared memory (/dev/shm, as large as the host's) of the host:
# UCX takes them for one machine then and moves memory directly (posix, cma, cuda_ipc) instead of over TCP.{gpus}
"""
GPUS = """ All
# see all GPUs, so that these can reach each other, and CUDA_VISIBLE_DEVICES says which are whose."""
HEALTHY = (
    "import http.client, sys; connection = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]), timeout=4); "
    "connection.request('GET', sys.argv[3]); sys.exit(connection.getresponse().status != 200)"
)


def render(recipe: Recipe) -> dict[str, str]:
    """Texts by file name."""
    import yaml

    services = {one.name: _service(recipe, one) for one in recipe.processes}
    services[recipe.front.name]["depends_on"] = {one.name: {"condition": "service_healthy"} for one in recipe.instances}
    head = HEAD.format(
        cluster=recipe.cluster,
        model=recipe.served_name,
        url=recipe.url,
        front=recipe.front.name,
        gpus="" if recipe.cpu else GPUS,
    )
    whole = {"name": f"kvferry-{recipe.cluster}".lower().replace(".", "-"), "services": services}
    return {FILE: f"{head}\n{yaml.safe_dump(whole, sort_keys=False, width=118)}"}


def _service(recipe: Recipe, process: Process) -> dict[str, Any]:
    service: dict[str, Any] = {
        "image": "${KVFERRY_IMAGE:-kvferry}",
        # The image's own would put words before these.
        "entrypoint": [_program(process.command[0])],
        "command": list(map(_literal, _joined(process.command[1:]))),
    }
    if process.environment:
        service["environment"] = {name: _literal(value) for name, value in sorted(process.environment.items())}
    if recipe.secret_file is None:
        service["env_file"] = [SECRET_ENV]
    service |= {"network_mode": "host", "ipc": "host", "pid": "host"}
    # cma reads the memory of other processes, RDMA locks its own.
    service |= {"cap_add": ["SYS_PTRACE", "IPC_LOCK"], "ulimits": {"memlock": -1, "nofile": 1048576}}
    if process.role and not recipe.cpu:
        gpus = {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [gpus]}}}
    service["volumes"] = [f"{path}:{path}:ro" for path in map(_literal, map(str, _files(recipe, process)))]
    service |= {
        "healthcheck": {
            "test": ["CMD", PYTHON, "-c", HEALTHY, *_address(process.ready_url)],
            "interval": "5s",
            "timeout": "5s",
            "retries": 3,
            "start_period": f"{process.start_s:.0f}s",
        },
        "restart": "unless-stopped",
        "stop_grace_period": f"{process.stop_s:.0f}s",
    }
    return service


def _joined(arguments: Sequence[str]) -> Iterator[str]:
    """A flag and its value as one word, where it has one value."""
    flag_and_values: list[str] = []
    for argument in [*arguments, "--"]:
        if argument.startswith("--") and flag_and_values:
            flag = flag_and_values[0].startswith("--")
            yield from ["=".join(flag_and_values)] if flag and len(flag_and_values) == 2 else flag_and_values
            flag_and_values = []
        flag_and_values.append(argument)


def _program(path: str) -> str:
    """The image has programs of its own."""
    return PYTHON if path == sys.executable else Path(path).name


def _files(recipe: Recipe, process: Process) -> list[Path]:
    """What of the host a process reads."""
    files = (recipe.secret_file, _whole(recipe.model) if process.role else recipe.admin_key)
    return [file for file in files if file is not None]


def _whole(model: Path) -> Path:
    """In the Hugging Face cache the files of a model are links to what lies beside its snapshots."""
    return model.parent.parent if model.parent.name == "snapshots" else model


def _address(url: str) -> list[str]:
    parts = urlsplit(url)
    return [str(parts.hostname), str(parts.port), parts.path]


def _literal(text: str) -> str:
    """Without a meaning of the dollar sign."""
    return text.replace("$", "$$")
