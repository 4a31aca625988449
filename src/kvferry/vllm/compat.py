"""Which vLLM this runs with, and what about an engine must agree with its peer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm

from kvferry.errors import UnsupportedError
from kvferry.geometry import Fingerprint
from kvferry.protocol.messages import PROTOCOL_VERSION
from kvferry.vllm.versions import NEWEST, OLDEST

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_VOLATILE = {"transformers_version", "dtype", "torch_dtype"}
_SAMPLES, _SAMPLE_BYTES = 8, 4096


def minor_version() -> tuple[int, int]:
    major, minor = vllm.__version__.split(".")[:2]
    return int(major), int(minor)


def require_supported(config: VllmConfig) -> None:
    """Refuse what would not work, before anything is allocated.

    Raises:
        UnsupportedError: this vLLM is outside the window, or the engine uses context parallelism.
    """
    if not OLDEST <= minor_version() <= NEWEST:
        raise UnsupportedError(
            f"KVFerry works with vLLM {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}, this is {vllm.__version__}"
        )
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise UnsupportedError(f"KVFerry does not support {name} > 1 yet; set it to 1")


def fingerprint(config: VllmConfig, model_id: str | None) -> Fingerprint:
    """What must be equal at producer and consumer; shapes and packings are compared layer by layer instead."""
    digest = hashlib.blake2b(digest_size=16)
    for part in _model_parts(config.model_config, model_id):
        digest.update(len(part).to_bytes(8, "little") + part)
    name = model_id or Path(config.model_config.model).name
    software = ".".join(map(str, minor_version()))
    return Fingerprint(f"{name}#{digest.hexdigest()}", PROTOCOL_VERSION, software)


def _model_parts(model: Any, model_id: str | None) -> Iterator[bytes]:
    config = {key: value for key, value in model.hf_config.to_dict().items() if key not in _VOLATILE and key[0] != "_"}
    yield json.dumps(config, sort_keys=True, default=str).encode()
    yield str(model.dtype).encode()
    directory = Path(model.model)
    if model_id is not None or not directory.is_dir():
        yield (model_id or model.model).encode()
        return
    # The same files under another path are the same model; another fine-tune of equal shape is not.
    for file in sorted(directory.glob("*.safetensors")):
        yield from _samples(file)


def _samples(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    yield f"{file.name}:{size}".encode()
    with file.open("rb") as stream:
        for sample in range(_SAMPLES):
            stream.seek(sample * size // _SAMPLES)
            yield stream.read(_SAMPLE_BYTES)
