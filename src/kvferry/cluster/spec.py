"""What to start: parallel layouts, instances, and the check of a layout against a model."""

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry.errors import SpecError

FLAGS = {
    "tp": "--tensor-parallel-size",
    "pp": "--pipeline-parallel-size",
    "dp": "--data-parallel-size",
    "pcp": "--prefill-context-parallel-size",
    "dcp": "--decode-context-parallel-size",
    "interleave": "--cp-kv-cache-interleave-size",
}
"""The sizes of a layout, and vLLM's flag for each."""
KEYS = (*FLAGS, "partition")
SIZE_LIMIT = 1024
INTERLEAVE_LIMIT = 1 << 16
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Layout:
    """Parallel sizes of an instance.

    Attributes:
        tp, pp, dp: tensor, pipeline and data parallel.
        partition: layers of each pipeline stage.
        pcp: prefill context parallel; such ranks are workers beside the tensor parallel ones.
        dcp: decode context parallel; of those ranks that hold the same heads, so many share out the tokens.
        interleave: tokens that such a rank takes at a time.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    partition: tuple[int, ...] | None = None
    pcp: int = 1
    dcp: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        for key in FLAGS:
            limit = INTERLEAVE_LIMIT if key == "interleave" else SIZE_LIMIT
            if not 1 <= getattr(self, key) <= limit:
                raise SpecError(f"{key}={getattr(self, key)} must be between 1 and {limit}")
        if self.partition is not None:
            self._check_partition(self.partition)

    def _check_partition(self, partition: tuple[int, ...]) -> None:
        text = "+".join(map(str, partition))
        if len(partition) != self.pp:
            raise SpecError(f"partition={text} names {len(partition)} pipeline stages, but pp={self.pp}")
        if min(partition) < 1:
            raise SpecError(f"partition={text} leaves a pipeline stage without layers")

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Read ``tp=2,pp=3,partition=1+2+1`` or ``tp=8,dcp=4,interleave=16``; what is not named is 1.

        Raises:
            SpecError: an unknown or repeated key, a size that is not a positive number, or anything else.
        """
        values: dict[str, Any] = {}
        for part in text.split(","):
            key, value = _key_and_value(part, text)
            if key in values:
                raise SpecError(f"{key} is given twice in {text!r}")
            values[key] = _stages(value) if key == "partition" else _size(key, value)
        return cls(**values)

    def __str__(self) -> str:
        always = ("tp", "pp", "dp")
        shown = [key for key in FLAGS if key in always or getattr(self, key) > 1]
        sizes = ",".join(f"{key}={getattr(self, key)}" for key in shown)
        return sizes if self.partition is None else f"{sizes},partition={'+'.join(map(str, self.partition))}"

    @property
    def label(self) -> str:
        """A short name, such as ``tp2pp2``; sizes of 1 are left out."""
        sizes = "".join(f"{key}{getattr(self, key)}" for key in FLAGS if getattr(self, key) > 1)
        uneven = "" if self.partition is None else "-" + "".join(map(str, self.partition))
        return (sizes or "tp1") + uneven

    @property
    def workers(self) -> int:
        """The number of worker processes of an instance."""
        return self.core_workers * self.dp

    @property
    def core_workers(self) -> int:
        """Those of one engine core, which load a prompt together."""
        return self.ranks * self.pp

    @property
    def ranks(self) -> int:
        """Workers of a pipeline stage; with prefill context parallelism each has as many ranks as there are tensor
        parallel ones, counted on from one to the next."""
        return self.tp * self.pcp


def _key_and_value(part: str, text: str) -> tuple[str, str]:
    key, equals, value = part.strip().partition("=")
    if not equals:
        raise SpecError(f"{part.strip()!r} in {text!r} is not of the form key=value, as in tp=2,pp=2,dp=1")
    if key not in KEYS:
        # What vLLM calls them is no key, but tells what was meant.
        names = {**{name: name for name in KEYS}, **{flag.strip("-"): name for name, flag in FLAGS.items()}}
        near = difflib.get_close_matches(key.lower().strip("-").replace("_", "-"), names, n=1, cutoff=0.3)
        hint = f"; did you mean {names[near[0]]}?" if near else ""
        raise SpecError(f"unknown key {key!r} in {text!r} (known: {', '.join(KEYS)}){hint}")
    return key, value


def _size(key: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and value.strip("0")):
        raise SpecError(f"{key}={value} is not a positive whole number")
    if len(value) > 9:
        raise SpecError(f"{key}={value[:9]}... is far too large")
    return int(value)


def _stages(value: str) -> tuple[int, ...]:
    return tuple(_size("partition", stage) for stage in value.split("+"))


@dataclass(frozen=True)
class InstanceSpec:
    """One vLLM instance: a model, a layout, a role and a port.

    `role` is a ``kv_role`` of vLLM (``kv_producer``, ``kv_consumer``, ``kv_both``), or None for a plain engine without
    a connector. `kv_load_failure_policy` is vLLM's: ``recompute`` or ``fail``, None for its default. `kv_cache_bytes`
    is per worker. Where `dtype`, `max_model_len`, `max_num_seqs` or `kv_cache_bytes` is None, vLLM decides. `extra`
    goes to vLLM's command line as it is. `host` is the address that its HTTP server binds. `cores` are those that its
    processes may run on; none for all.
    """

    name: str
    model: Path
    layout: Layout
    port: int
    role: str | None = None
    served_name: str = "model"
    dtype: str | None = "float32"
    max_model_len: int | None = 2048
    max_num_seqs: int | None = 8
    kv_cache_bytes: int | None = 64 << 20
    connector_config: dict[str, Any] = field(default_factory=dict)
    kv_load_failure_policy: str | None = None
    extra: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    host: str = LOOPBACK
    cores: tuple[int, ...] = ()

    @property
    def url(self) -> str:
        """Where this machine reaches the instance's HTTP server."""
        return f"http://{reachable(self.host)}:{self.port}"


def reachable(host: str) -> str:
    """The address at which this machine reaches what listens on `host`; one that means every address is no address."""
    return LOOPBACK if host in ("", "0.0.0.0", "::") else host


def read_model_config(model: Path) -> dict[str, Any]:
    """The text part of the model's ``config.json``.

    Raises:
        SpecError: there is no such model, or its config.json is unreadable.
    """
    path = model / "config.json"
    if not model.is_dir():
        raise SpecError(f"there is no model directory {model}")
    if not path.is_file():
        raise SpecError(f"{model} is not a model directory: it has no config.json")
    return read_config_file(path)


def read_config_file(path: Path) -> dict[str, Any]:
    """The text part of a ``config.json``.

    Raises:
        SpecError: the file is unreadable or holds something else.
    """
    try:
        config = json.loads(path.read_text())
        return dict(config.get("text_config") or config)
    except (ValueError, AttributeError, TypeError, OSError) as error:
        raise SpecError(f"{path} cannot be read: {error}") from error


def check_layout(layout: Layout, config: dict[str, Any]) -> None:
    """Hold a layout against a model, by the rules vLLM itself applies when it starts.

    Raises:
        SpecError: the model cannot be split that way; the text gives every reason.
    """
    if reasons := layout_reasons(layout, config):
        raise SpecError(f"{layout} does not fit the model: {'; '.join(reasons)}")


def layout_reasons(layout: Layout, config: dict[str, Any]) -> list[str]:
    """Every reason why the model cannot be split that way; empty when it can."""
    return [*_tensor_reasons(layout, config), *_context_reasons(layout, config), *_pipeline_reasons(layout, config)]


def _tensor_reasons(layout: Layout, config: dict[str, Any]) -> list[str]:
    heads = config.get("num_attention_heads")
    if not isinstance(heads, int):
        return []
    reasons = [f"{heads} attention heads cannot be split over tp={layout.tp}"] if heads % layout.tp else []
    # A latent cache (MLA) has one head, which every rank holds whole.
    kv_heads = 1 if config.get("kv_lora_rank") else config.get("num_key_value_heads") or heads
    if kv_heads != heads and kv_heads % layout.tp and layout.tp % kv_heads:
        reasons.append(f"{kv_heads} KV heads cannot be split over, or repeated on, tp={layout.tp}")
    return reasons


def _context_reasons(layout: Layout, config: dict[str, Any]) -> Iterator[str]:
    """By the rules of vLLM's ``ParallelConfig`` and ``ModelConfig.verify_with_parallel_config``."""
    tp, pcp, dcp = layout.tp, layout.pcp, layout.dcp
    if pcp == 1 and tp % dcp:
        yield f"dcp={dcp} does not divide tp={tp}"
    if pcp > 1 and dcp not in (1, pcp, tp * pcp):
        yield f"dcp={dcp} is not one of {', '.join(map(str, sorted({1, pcp, tp * pcp})))}, as pcp={pcp} asks for"
    heads = config.get("num_attention_heads")
    if dcp == 1 or config.get("kv_lora_rank") or not isinstance(heads, int):
        return
    kv_heads = config.get("num_key_value_heads") or heads
    if tp <= kv_heads:
        yield f"dcp={dcp} needs tensor parallel ranks with the same KV head, and tp={tp} has none of {kv_heads}"
    elif dcp > tp // kv_heads:
        yield f"dcp={dcp} is more than the {tp // kv_heads} ranks of tp={tp} that have the same of {kv_heads} KV heads"
    if heads // kv_heads % dcp:
        yield f"{heads // kv_heads} attention heads of a KV head cannot be split over dcp={dcp}"


def _pipeline_reasons(layout: Layout, config: dict[str, Any]) -> list[str]:
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int):
        return []
    if layers < layout.pp:
        return [f"{layers} layers are too few for pp={layout.pp}"]
    if layout.partition is not None and sum(layout.partition) != layers:
        return [f"the partition adds up to {sum(layout.partition)} layers, the model has {layers}"]
    return []


def kv_bytes_per_token(config: dict[str, Any], dtype: str) -> int:
    """Bytes of KV cache per token over all layers and heads: an upper bound for any one worker."""
    size = 4 if dtype == "float32" else 2
    heads = config.get("num_attention_heads", 1)
    if config.get("kv_lora_rank"):
        per_layer = config["kv_lora_rank"] + config.get("qk_rope_head_dim", 0)
    else:
        head_size = config.get("head_dim") or config.get("hidden_size", 0) // heads
        per_layer = 2 * (config.get("num_key_value_heads") or heads) * head_size
    return int(config.get("num_hidden_layers", 1) * per_layer * size)
