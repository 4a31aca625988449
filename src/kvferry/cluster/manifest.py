"""What a cluster is to be: the schema of ``cluster.yaml``, which the options of ``kvferry up`` are written into too."""

import difflib
from collections.abc import Hashable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta

from kvferry.cluster import flags
from kvferry.cluster.flags import Flags
from kvferry.cluster.spec import LOOPBACK, Layout
from kvferry.errors import GatewayError, SettingsError, SpecError
from kvferry.gateway.settings import Role

Seconds = Annotated[float, Meta(gt=0)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Replicas = Annotated[int, Meta(ge=1, le=1024)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Variables = dict[str, str | int | float]
DEFAULT_NAME = "default"

GATEWAY_OPTIONS = (
    "access-log",
    "api-key-file",
    "attempts",
    "deadline",
    "decode-policy",
    "engine-key-file",
    "idle-timeout",
    "plain-decode",
    "prefill-policy",
    "prefill-timeout",
    "probe-interval",
    "skip-prefill-below",
    "streaming",
    "workers",
)
"""Options of ``kvferry gateway`` that a cluster does not set itself."""

_OWN_ADDRESS = ("side_channel_port", "side_channel_host", "secret_file")


class Router(StrEnum):
    """What serves the one URL."""

    GATEWAY = "gateway"
    VLLM_ROUTER = "vllm-router"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What can be said for all instances, for those of one role, and for one.

    Attributes:
        vllm: flags of ``vllm serve``; unknown ones pass through untouched.
        connector: options of ``kv_connector_extra_config``.
        environment: variables.
    """

    vllm: dict[str, Any] = {}
    connector: dict[str, Any] = {}
    environment: Variables = {}


class Side(Settings, frozen=True, kw_only=True):
    """The instances of one role.

    Attributes:
        layout: as ``tp=2,pp=2``, or a mapping of the same keys.
        replicas: how many of them.
    """

    layout: str | dict[str, Any] = "tp=1"
    replicas: Replicas = 1


class Override(Settings, frozen=True, kw_only=True):
    """What differs for one instance.

    Attributes:
        layout: instead of that of its role.
        devices: GPU ids, or CPU cores; as many as the layout has workers, or (cores only) a multiple of that.
        port: of its HTTP server.
        side_channel_port: the first of as many as its layout has data parallel ranks.
    """

    layout: str | dict[str, Any] | None = None
    devices: list[int | str] | None = None
    port: Port | None = None
    side_channel_port: Port | None = None


class Manifest(Settings, frozen=True, kw_only=True):
    """A whole cluster.

    Attributes:
        model: a directory, or the name of a model in the local Hugging Face cache.
        name: tells clusters of one machine apart.
        served_model_name: what clients call the model; `model` as it is written, where not given.
        host: address of the one URL.
        port: of the one URL; where not given 8080, or another one if that is taken.
        instance_host: address of the instances; they need no other than the loopback one.
        router: what serves the one URL.
        gateway: options of ``kvferry gateway``.
        devices: GPU ids or CPU cores to use; all, where not given.
        secret_file: the secret that all instances share; a fresh one, where not given.
        start_timeout: seconds that an instance may take to start.
        drain_timeout: seconds that requests under way may take when an instance, or everything, is to stop.
    """

    model: str
    name: Name = DEFAULT_NAME
    served_model_name: str | None = None
    host: str = LOOPBACK
    port: Port | None = None
    instance_host: str = LOOPBACK
    router: Router = Router.GATEWAY
    prefill: Side = Side()
    decode: Side = Side()
    instances: dict[str, Override] = {}
    gateway: dict[str, Any] = {}
    devices: list[int | str] | None = None
    secret_file: str | None = None
    start_timeout: Seconds = 600.0
    drain_timeout: Seconds = 60.0

    @property
    def served_name(self) -> str:
        return self.served_model_name or self.model

    def side(self, role: Role) -> Side:
        return self.prefill if role is Role.PREFILL else self.decode

    def override(self, role: Role, index: int) -> Override:
        return self.instances.get(instance_name(role, index), Override())

    def layout(self, role: Role, index: int) -> Layout:
        """Raises ``SpecError`` where it is none."""
        name = instance_name(role, index)
        own = self.override(role, index).layout
        if own is not None:
            return layout_of(own, f"instances.{name}.layout")
        return layout_of(self.side(role).layout, f"{role}.layout")

    def flags(self, role: Role, index: int) -> Flags:
        """vLLM's flags for one instance. Raises ``SpecError`` for one that the cluster sets itself."""
        name = instance_name(role, index)
        levels = (
            (self, "vllm"),
            (self.side(role), f"{role}.vllm"),
            (self.override(role, index), f"instances.{name}.vllm"),
        )
        return flags.merged(*(flags.from_mapping(level.vllm, where) for level, where in levels))

    def connector_config(self, role: Role, index: int) -> dict[str, Any]:
        return {**self.connector, **self.side(role).connector, **self.override(role, index).connector}

    def environment_of(self, role: Role, index: int) -> dict[str, str]:
        levels = (self.environment, self.side(role).environment, self.override(role, index).environment)
        return {name: str(value) for level in levels for name, value in level.items()}


def instance_name(role: Role, index: int) -> str:
    return f"{role}-{index}"


def layout_of(given: str | Mapping[str, Any], where: str) -> Layout:
    """Raises:
    SpecError: it is no layout; the text says where.
    """
    try:
        if isinstance(given, str):
            return Layout.parse(given)
        sizes = dict(given)
        if isinstance(partition := sizes.get("partition"), list):
            sizes["partition"] = "+".join(map(str, partition))
        return Layout.parse(",".join(f"{key}={value}" for key, value in sizes.items()) or "tp=1")
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from error


def parse(raw: Any, source: str = "") -> Manifest:
    """Check what a cluster is to be; `source` begins every complaint, where there is one.

    Raises:
        SpecError: an unknown key (the nearest known one is named), a value of the wrong kind, or things that
            contradict each other.
    """
    try:
        if not isinstance(raw, Mapping):
            raise SpecError("a mapping of keys is needed, such as `model: DIRECTORY`")
        _check_keys(raw, Manifest, "")
        manifest = _converted(raw)
        _check(manifest)
        return manifest
    except SpecError as error:
        raise SpecError(f"{source}: {error}" if source else str(error)) from error


def _converted(raw: Mapping[str, Any]) -> Manifest:
    if "model" not in raw:
        raise SpecError("`model` is missing: a directory, or the name of a model in the Hugging Face cache")
    try:
        return msgspec.convert(raw, Manifest)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$.")
        raise SpecError(f"{path.rstrip('`')}: {text}" if path else text) from error


def _check_keys(raw: Any, kind: type[msgspec.Struct], where: str) -> None:
    """Against the fields of a struct and of the structs in it; what is no mapping is for the conversion to refuse."""
    if not isinstance(raw, Mapping):
        return
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    _require_known(raw, fields, where)
    for key, value in raw.items():
        path = f"{where}.{key}" if where else str(key)
        inner = fields[key]
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            _check_keys(value, inner, path)
        elif get_args(inner)[1:] == (Override,) and isinstance(value, Mapping):
            for name, override in value.items():
                _check_keys(override, Override, f"{path}.{name}")


def _require_known(given: Iterable[Any], known: Iterable[str], where: str) -> None:
    names = list(known)
    for key in given:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}"
            raise SpecError(f"unknown key {str(key)!r}{f' in {where}' if where else ''}: {hint}")


def _check(manifest: Manifest) -> None:
    known = []
    for role in Role:
        for index in range(manifest.side(role).replicas):
            known.append(instance_name(role, index))
            manifest.layout(role, index)
            manifest.flags(role, index)
            _check_connector(manifest.connector_config(role, index))
    # A replica that only `kvferry scale` will add may have its override already.
    _require_known(manifest.instances, [*known, *filter(_is_instance, manifest.instances)], "instances")
    for where, level in (("connector", manifest), ("prefill.connector", manifest.prefill)):
        _require_no_address(level.connector, where)
    _require_no_address(manifest.decode.connector, "decode.connector")
    _check_gateway(manifest)
    _check_ports(manifest)


def _is_instance(name: str) -> bool:
    role, _, index = name.rpartition("-")
    return role in list(Role) and index.isascii() and index.isdigit() and str(int(index)) == index


def _check_connector(options: dict[str, Any]) -> None:
    from kvferry.vllm.settings import parse_settings

    try:
        parse_settings(options)
    except SettingsError as error:
        raise SpecError(str(error)) from error


def _require_no_address(options: Mapping[str, Any], where: str) -> None:
    for key in _OWN_ADDRESS:
        if key in options:
            hint = "secret_file at the top" if key == "secret_file" else "instances.NAME.side_channel_port"
            raise SpecError(f"{where}: {key} differs between instances, or is the cluster's; use {hint}")


def _check_gateway(manifest: Manifest) -> None:
    options = {str(key).replace("_", "-"): value for key, value in manifest.gateway.items()}
    if manifest.router is not Router.GATEWAY and options:
        raise SpecError(f"gateway: there is no gateway with router: {manifest.router}")
    _require_known(options, GATEWAY_OPTIONS, "gateway")
    _check_gateway_values({key.replace("-", "_"): value for key, value in options.items()})


class _Workers(msgspec.Struct):
    """Options of the command that are no settings of the gateway."""

    workers: Annotated[int, Meta(ge=1, le=256)] = 1
    access_log: bool = True


def _check_gateway_values(options: Mapping[str, Any]) -> None:
    """By the gateway's own rules; it would find them out only when all engines have started."""
    from kvferry.gateway.settings import Settings as GatewaySettings
    from kvferry.gateway.settings import read_keys

    try:
        msgspec.convert(options, _Workers, strict=False)
        msgspec.convert(options, GatewaySettings, strict=False)
        for key in ("api_key_file", "engine_key_file"):
            read_keys(options.get(key))
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$.")
        raise SpecError(f"gateway.{path.rstrip('`').replace('_', '-')}: {text}") from error
    except GatewayError as error:
        raise SpecError(f"gateway: {error}") from error


def _check_ports(manifest: Manifest) -> None:
    owners: dict[int, str] = {} if manifest.port is None else {manifest.port: "port"}
    for name, override in manifest.instances.items():
        given = [(override.port, "port"), (override.side_channel_port, "side_channel_port")]
        for port, key in given:
            if port is not None and owners.setdefault(port, f"instances.{name}.{key}") != f"instances.{name}.{key}":
                raise SpecError(f"instances.{name}.{key}: {port} is {owners[port]} already")


def gateway_arguments(options: Mapping[str, Any]) -> list[str]:
    """Options of ``kvferry gateway`` as its command line."""
    return list(flags.to_arguments(flags.from_mapping({str(key): value for key, value in options.items()}, "gateway")))


def read_yaml(path: Path) -> Any:
    """What a YAML file holds.

    Raises:
        SpecError: it cannot be read, is no YAML, or names a key twice.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses what YAML would let pass: a key that is there twice, of which the last wins without a word."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                if str(key.value) in seen:
                    raise SpecError(f"{path}: line {key.start_mark.line + 1}: {key.value!r} is there twice")
                seen.add(str(key.value))
            return super().construct_mapping(node, deep)  # type: ignore[no-any-return]

    try:
        return yaml.load(path.read_text(), Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise SpecError(f"{path}: {where}{getattr(error, 'problem', None) or error}") from error
