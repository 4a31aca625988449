"""``kvferry render``: a cluster as files for just, systemd or docker compose."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvferry.cli.console import examples, out, reported_errors

EXAMPLE = examples(
    "kvferry render just cluster.yaml",
    "kvferry render systemd cluster.yaml --output /etc/kvferry/llama",
)


class Format(StrEnum):
    """What runs the files."""

    JUST = "just"
    SYSTEMD = "systemd"
    COMPOSE = "compose"


NEXT = {
    Format.JUST: "just --justfile {}/justfile",
    Format.SYSTEMD: "systemctl link {0}/*.service {0}/*.target",
    Format.COMPOSE: "docker compose --file {}/compose.yaml up --wait",
}


def render(
    kind: Annotated[Format, typer.Argument(metavar="just|systemd|compose", help="What is to run the cluster.")],
    file: Annotated[Path, typer.Argument(metavar="cluster.yaml", help="The cluster, as for kvferry up.")],
    output: Annotated[Path | None, typer.Option(help="Directory for the files; NAME-just and so on otherwise.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there; keys are kept.")] = False,
) -> None:
    """Write the cluster that kvferry up would start as files that a person can read, change and run.

    Devices and ports are chosen now, from what this machine has. Secrets are in files that only you can read.
    """
    with reported_errors():
        from kvferry.cluster.manifest import parse, read_yaml
        from kvferry.cluster.recipes import files

        manifest = parse(read_yaml(file), str(file))
        directory = (output or Path(f"{manifest.name}-{kind}")).absolute()
        for path in files.write(manifest, kind, directory, force):
            out.print(path, markup=False)
        out.print(f"Next: {NEXT[kind].format(directory)}", markup=False)
