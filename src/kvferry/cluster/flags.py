"""vLLM's command line flags as they pass through: merged by name, otherwise untouched."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvferry.cluster.spec import FLAGS as LAYOUT_FLAGS
from kvferry.errors import SpecError

Flags = dict[str, tuple[str, ...]]
"""Values by flag, as ``--max-model-len``; a flag without a value has none."""

_FLAG = re.compile(r"--?[A-Za-z]")
# What would contradict the rest of the cluster, and where to say it instead.
RESERVED = {
    "--model": "MODEL",
    "--served-model-name": "served_model_name",
    "--host": "instance_host",
    "--port": "the port of one of `instances`",
    **dict.fromkeys([*LAYOUT_FLAGS.values(), "--dcp-kv-cache-interleave-size"], "the layout"),
    **dict.fromkeys(["-tp", "-pp", "-dp", "-pcp", "-dcp"], "the layout"),
    "--kv-transfer-config": "connector",
    "--api-key": "gateway: {api-key-file: ...}",
}
UNSUPPORTED = {
    "--config": "it would hide flags from the cluster; write them under vllm:",
    "--disable-log-stats": "the counters on /metrics are what load and transfers are read from",
    "--headless": "an instance without its HTTP server cannot be asked",
    "--nnodes": "the cluster is on one machine",
    "--ssl-certfile": "instances speak plain HTTP; TLS is for what stands before the gateway",
    "--ssl-keyfile": "instances speak plain HTTP; TLS is for what stands before the gateway",
    "--uds": "instances are reached over TCP",
}


def from_mapping(given: Mapping[str, Any], where: str) -> Flags:
    """From YAML: ``max-model-len: 2048``, ``enforce-eager: true`` (false: ``--no-enforce-eager``), a list, an object.

    Raises:
        SpecError: a key or value that cannot be a flag, or a flag that the cluster sets itself; `where` says which.
    """
    flags: Flags = {}
    for key, value in given.items():
        flag = _name(key) if key.startswith("-") else _name(f"--{key}")
        if value is False:
            flag, value = f"--no-{flag.removeprefix('--')}", True
        flags = merged(flags, {flag: _values(value)})
    return _allowed(flags, where)


def from_arguments(arguments: Sequence[str], where: str) -> Flags:
    """From a command line: ``--flag value``, ``--flag=value``, ``--flag`` and short ones.

    Raises:
        SpecError: it does not begin with a flag, or has one that the cluster sets itself.
    """
    flags: Flags = {}
    flag = ""
    for argument in arguments:
        if _FLAG.match(argument):
            flag, equals, value = argument.partition("=")
            flag = _name(flag)
            flags = merged(flags, {flag: (value,) if equals else ()})
        elif flag:
            flags[flag] = (*flags[flag], argument)
        else:
            raise SpecError(f"{where}: {argument!r} is not a flag of vLLM; flags begin with --")
    return _allowed(flags, where)


def merged(*levels: Mapping[str, tuple[str, ...]]) -> Flags:
    """All flags; the last level that names one wins, also over its opposite (``--no-...``)."""
    flags: Flags = {}
    for level in levels:
        for flag, values in level.items():
            flags.pop(flag, None)
            flags.pop(_opposite(flag), None)
            flags[flag] = values
    return flags


def to_arguments(flags: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The command line."""
    return tuple(argument for flag, values in flags.items() for argument in (flag, *values))


def _name(flag: str) -> str:
    # A path of keys may follow, as in --hf-overrides.rope_theta; those are not vLLM's to spell either way.
    head, dot, path = flag.partition(".")
    return (head.replace("_", "-") if head.startswith("--") else head) + dot + path


def _opposite(flag: str) -> str:
    return f"--{flag.removeprefix('--no-')}" if flag.startswith("--no-") else f"--no-{flag.removeprefix('--')}"


def _values(value: Any) -> tuple[str, ...]:
    if value is True or value is None:
        return ()
    if isinstance(value, list):
        return tuple(map(_text, value))
    return (_text(value),)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _allowed(flags: Flags, where: str) -> Flags:
    for flag in flags:
        if flag in RESERVED:
            raise SpecError(f"{where}: {flag} is set by the cluster; give it as {RESERVED[flag]}")
        if flag in UNSUPPORTED:
            raise SpecError(f"{where}: {flag} cannot be used in a cluster: {UNSUPPORTED[flag]}")
    return flags


def value_of(flags: Mapping[str, tuple[str, ...]], names: Iterable[str]) -> str | None:
    """The single value of the first of the flags that is there and has one."""
    return next((flags[name][0] for name in names if len(flags.get(name, ())) == 1), None)
