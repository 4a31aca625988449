"""A cluster as systemd units: a service for each process, and a target that starts and stops them together."""

import getpass
from collections.abc import Iterator

from kvferry.cluster.recipes.keys import SECRET_ENV
from kvferry.cluster.recipes.processes import Process, Recipe

TARGET = """\
# The cluster {cluster}, which serves {model} on {url}.
# Written by `kvferry render systemd`; edit it as you like.
#
#   systemctl link {directory}/*.service {directory}/*.target
#   systemctl start {target}
#   journalctl --follow --unit '{prefix}*'
#   systemctl stop {target}
#
# or each with --user. A stop ends the {front} first, which lets requests under way finish, and then the instances.

[Unit]
Description=KVFerry cluster {cluster}
Wants={wants}

[Install]
WantedBy=default.target
"""


def render(recipe: Recipe) -> dict[str, str]:
    """Texts by file name."""
    prefix = f"kvferry-{recipe.cluster}"
    target = f"{prefix}.target"
    services = {one.name: f"{prefix}-{one.name}.service" for one in recipe.processes}
    described = TARGET.format(
        cluster=recipe.cluster,
        model=recipe.served_name,
        url=recipe.url,
        directory=recipe.directory,
        target=target,
        prefix=prefix,
        front=recipe.front.name,
        wants=" ".join(services.values()),
    )
    # Units stop in the reverse of this order.
    before_front = [services[one.name] for one in recipe.instances]
    units = {
        services[one.name]: _service(recipe, one, target, before_front if one is recipe.front else [])
        for one in recipe.processes
    }
    return {target: described, **units}


def _service(recipe: Recipe, process: Process, target: str, after: list[str]) -> str:
    return "\n".join(_lines(recipe, process, target, after)) + "\n"


def _lines(recipe: Recipe, process: Process, target: str, after: list[str]) -> Iterator[str]:
    yield f"# {process.name} of the cluster {recipe.cluster}: {process.title}"
    yield ""
    yield "[Unit]"
    yield f"Description=KVFerry {recipe.cluster}: {process.name}"
    yield f"PartOf={target}"
    yield f"After={' '.join(['network.target', *after])}"
    yield "StartLimitIntervalSec=0"
    yield ""
    yield "[Service]"
    yield "Type=exec"
    yield f"User={getpass.getuser()}"
    if recipe.secret_file is None:
        yield f"EnvironmentFile={_literal(str(recipe.directory / SECRET_ENV))}"
    for name, value in sorted(process.environment.items()):
        yield f"Environment={_quoted(f'{name}={value}')}"
    if process.without:
        yield f"UnsetEnvironment={' '.join(process.without)}"
    yield f"ExecStart={_command(process)}"
    yield "Restart=always"
    yield "RestartSec=2"
    yield "# SIGTERM to the main process alone, which ends its workers; what is left after that, or in time, is killed."
    yield "KillMode=mixed"
    yield f"TimeoutStopSec={process.stop_s:.0f}"
    yield "# RDMA needs locked memory, and a gateway many connections."
    yield "LimitMEMLOCK=infinity"
    yield "LimitNOFILE=1048576"
    yield ""
    yield "[Install]"
    yield f"WantedBy={target}"


def _command(process: Process) -> str:
    """The program, and each flag with its values on a line of its own."""
    lines = [""]
    for part in process.command:
        if part.startswith("--"):
            lines.append("    ")
        # Where a command stands a dollar sign names a variable.
        lines[-1] += _quoted(part).replace("$", "$$") + " "
    return " \\\n".join(line.rstrip() for line in lines)


def _quoted(text: str) -> str:
    """One word of a unit file."""
    plain = _literal(text)
    if text and not set(text) & set(" \t\n\"'\\;"):
        return plain
    escaped = plain.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{escaped}"'


def _literal(text: str) -> str:
    """Without a meaning of the percent sign."""
    return text.replace("%", "%%")
