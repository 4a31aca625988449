"""Who is measured: how engines are told about a connector, and what is in front of them.

A contender is data, so that one from a file is no different from those that are known by name.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import yaml

from kvferry.cluster.commands import CONNECTOR, CPU_PATIENCE
from kvferry.errors import SpecError

LMCACHE_SERVER = (
    *("{bin}/lmcache", "server", "--host", "127.0.0.1", "--port", "{port:lmcache}"),
    *("--http-host", "127.0.0.1", "--http-port", "{port:lmcache-http}", "--l1-size-gb", "2", "--l1-init-size-gb", "1"),
    *("--eviction-policy", "LRU", "--chunk-size", "256", "--disable-observability"),
    *("--supported-transfer-mode", "auto"),  # else engines on CPU wait for ever
)
PATCHED_NIXL, PATCHED_MOONCAKE = "kvferry.vllm.peers.nixl", "kvferry.vllm.peers.mooncake"


class Front(StrEnum):
    """What requests are sent to.

    ``direct`` is the only engine. ``round-robin`` is vllm-router before engines that each do everything. ``gateway`` is
    the project's, prefill first, and ``gateway-streaming`` the same with both legs at once. ``router`` is vllm-router
    in its NIXL mode, ``router-mooncake`` in its Mooncake mode. ``client`` is none: whoever asks sends the prompt to the
    prefill engine and then to the decode engine, as connectors want it that share a store and take no parameters.
    """

    DIRECT = "direct"
    ROUND_ROBIN = "round-robin"
    GATEWAY = "gateway"
    STREAMING = "gateway-streaming"
    ROUTER = "router"
    ROUTER_MOONCAKE = "router-mooncake"
    CLIENT = "client"

    @property
    def plain(self) -> bool:
        """Whether engines do everything, and none has a connector."""
        return self in (Front.DIRECT, Front.ROUND_ROBIN)


class Side(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine: vLLM's ``kv_transfer_config``, variables and further arguments."""

    kv_transfer_config: dict[str, Any] = {}
    environment: dict[str, str] = {}
    arguments: tuple[str, ...] = ()


class Contender(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All texts may hold ``{directory}`` (empty, of this turn), ``{bin}`` (of the Python environment) and
    ``{port:NAME}``, a free port, the same for a name.

    Attributes:
        prefill, decode: the engines; a plain contender has only ``decode`` ones.
        front: what is in front of them.
        servers: processes that have to run beside the engines, started before them.
        needs: modules that have to be installed.
        python: the interpreter of another environment to start engines with; it needs vLLM, and kvferry for the
            treatment that all engines on CPU get.
        note: what a reader has to know, such as "patched".
    """

    decode: Side = Side()
    prefill: Side = Side()
    front: Front = Front.ROUTER
    servers: tuple[tuple[str, ...], ...] = ()
    needs: tuple[str, ...] = ()
    python: str | None = None
    note: str = ""


def _pair(
    connector: str, extra: Mapping[str, Any] | None = None, more: Mapping[str, Any] | None = None
) -> tuple[Side, Side]:
    common: dict[str, Any] = {"kv_connector": connector, **(more or {})}
    if extra:
        common["kv_connector_extra_config"] = dict(extra)
    prefill, decode = ({**common, "kv_role": role} for role in ("kv_producer", "kv_consumer"))
    return Side(prefill), Side(decode)


def _nixl(connector: str, more: Mapping[str, Any] | None = None, note: str = "") -> Contender:
    sides = _pair(connector, more=more)
    prefill, decode = (
        msgspec.structs.replace(side, environment={"VLLM_NIXL_SIDE_CHANNEL_PORT": f"{{port:{name}}}"})
        for side, name in zip(sides, ("prefill", "decode"), strict=True)
    )
    return Contender(decode, prefill, Front.ROUTER, needs=("nixl",), note=note)


def _kvferry(front: Front, note: str) -> Contender:
    prefill, decode = _pair(CONNECTOR, CPU_PATIENCE)
    return Contender(decode, prefill, front, needs=("nixl",), note=note)


def _known() -> dict[str, Contender]:
    delayed = {"kv_connector_module_path": PATCHED_NIXL}
    example = _pair("ExampleConnector", {"shared_storage_path": "{directory}"})
    lmcache = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": "{port:lmcache}"}
    cache = Side({"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": lmcache})
    cache = msgspec.structs.replace(cache, environment={"PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false"})
    moon_prefill, moon_decode = (
        msgspec.structs.replace(side, environment={"VLLM_MOONCAKE_BOOTSTRAP_PORT": f"{{port:{name}}}"})
        for side, name in zip(
            _pair("MooncakeConnector", {"mooncake_protocol": "tcp"}, {"kv_connector_module_path": PATCHED_MOONCAKE}),
            ("bootstrap", "other-bootstrap"),
            strict=True,
        )
    )
    return {
        "kvferry": _kvferry(Front.GATEWAY, "prefill first"),
        "kvferry-streaming": _kvferry(Front.STREAMING, "both legs at once"),
        "nixl": _nixl("NixlConnector"),
        "nixl-patched": _nixl("NixlConnector", delayed, "patched: NIXL's progress thread pauses 1,000 us"),
        "nixl-push": _nixl("NixlPushConnector", note="one leg after the other"),
        "nixl-push-patched": _nixl("NixlPushConnector", delayed, "patched: NIXL's progress thread pauses 1,000 us"),
        "lmcache-mp": Contender(
            cache,
            cache,
            Front.CLIENT,
            (LMCACHE_SERVER,),
            ("lmcache",),
            note="a shared cache on one host; whole chunks of 256 tokens move",
        ),
        "mooncake": Contender(
            moon_decode,
            moon_prefill,
            Front.ROUTER_MOONCAKE,
            needs=("mooncake",),
            note="patched: told of an accelerator 0 where there is none; over TCP",
        ),
        "example": Contender(
            example[1], example[0], Front.CLIENT, note="files; whole blocks move, and the rest is computed again"
        ),
        "plain": Contender(front=Front.DIRECT, note="one engine"),
        "plain-cached": Contender(
            Side(arguments=("--enable-prefix-caching",)), front=Front.DIRECT, note="one engine that keeps prefixes"
        ),
        "plain-dp": Contender(front=Front.ROUND_ROBIN, note="two engines that each do everything"),
    }


KNOWN = _known()
USUAL = ("kvferry", "kvferry-streaming", "nixl", "nixl-patched", "plain", "plain-dp")


def chosen(texts: Sequence[str], pythons: Sequence[str]) -> dict[str, Contender]:
    """Contenders by name, in the order given.

    Args:
        texts: each a known name, or ``name=file`` with a YAML or JSON file that holds a ``Contender``.
        pythons: each ``name=interpreter``, for one of them.

    Raises:
        SpecError: an unknown or repeated name, or a file that does not hold one.
    """
    found: dict[str, Contender] = {}
    for text in texts:
        name, given, file = text.partition("=")
        if name in found:
            raise SpecError(f"--contender {name} is given twice")
        if not name or not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
            raise SpecError(f"--contender {text!r}: a name has letters, digits, '-', '_' and '.'")
        found[name] = _from_file(Path(file)) if given else _by_name(name)
    for text in pythons:
        name, _, interpreter = text.partition("=")
        if name not in found:
            raise SpecError(f"--python {text}: there is no contender {name!r} in this run")
        if not Path(interpreter).is_file():
            raise SpecError(f"--python {text}: there is no file {interpreter!r}")
        found[name] = msgspec.structs.replace(found[name], python=interpreter)
    return found


def _by_name(name: str) -> Contender:
    if name not in KNOWN:
        near = difflib.get_close_matches(name, KNOWN, n=1)
        hint = f"did you mean {near[0]}?" if near else "name=FILE describes another one"
        raise SpecError(f"there is no contender {name!r} (known: {', '.join(KNOWN)}); {hint}")
    return KNOWN[name]


def _from_file(file: Path) -> Contender:
    try:
        text = file.read_text()
        given = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
        contender = msgspec.convert(given, Contender)
    except (OSError, ValueError, yaml.YAMLError, msgspec.ValidationError) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error).replace("\n", " ")
        raise SpecError(f"{file} does not describe a contender: {said}") from error
    for side in (contender.prefill, contender.decode):
        if contender.front.plain == bool(side.kv_transfer_config):
            wanted = "no" if contender.front.plain else "a"
            raise SpecError(f"{file}: with front {contender.front} each engine has {wanted} kv_transfer_config")
    return contender


def filled(contender: Contender, values: Mapping[str, str | int]) -> Contender:
    """With ``{name}`` replaced by ``values[name]`` in all texts.

    What is nothing but a number's name becomes a number in a ``kv_transfer_config``.
    """
    return msgspec.convert(_filled(msgspec.to_builtins(contender), values, False), Contender)


def _filled(value: Any, values: Mapping[str, str | int], numbers: bool) -> Any:
    if isinstance(value, dict):
        return {key: _filled(each, values, numbers or key == "kv_transfer_config") for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_filled(each, values, numbers) for each in value]
    if not isinstance(value, str):
        return value
    for name, given in values.items():
        if numbers and value == f"{{{name}}}":
            return given
        value = value.replace(f"{{{name}}}", str(given))
    return value


def port_names(contender: Contender) -> list[str]:
    """The names of ``{port:NAME}`` in a contender, each once."""
    text = msgspec.json.encode(contender).decode()
    parts = text.split("{port:")[1:]
    return list(dict.fromkeys(part.partition("}")[0] for part in parts))
