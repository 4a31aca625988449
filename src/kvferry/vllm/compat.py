"""Which engines are served, and what about an engine must agree with its peer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
import vllm.platforms

from kvferry.errors import UnsupportedError
from kvferry.geometry import Fingerprint
from kvferry.protocol.messages import PROTOCOL_VERSION
from kvferry.vllm.continuation import layer_specs
from kvferry.vllm.versions import minor_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

SHARES_TOKENS = (0, 31)
"""The first minor version whose specs say which caches decode context parallelism shares out (``dcp_sharded``)."""

GUESSED_MODES, GUESSED_KINDS = frozenset({"none", "align"}), frozenset({"MAMBA2", "GDN_ATTN", "SHORT_CONV"})
"""Where the states that speculative decoding keeps for its guesses are known to lie behind the prompt's: by cache mode
(``--mamba-cache-mode``) and kind of recurrent layer."""

_VOLATILE = {"transformers_version", "dtype", "torch_dtype"}
_SAMPLES, _SAMPLE_BYTES = 8, 4096


def require_supported(config: VllmConfig, kv_cache_config: KVCacheConfig | None = None) -> None:
    """Refuse what would not work, before anything is allocated.

    Raises:
        UnsupportedError: with every reason.
    """
    reasons = [*_parallelism(config), *_caches(config, kv_cache_config)]
    if reasons:
        raise UnsupportedError("KVFerry cannot serve this engine: " + "; ".join(reasons))


def _parallelism(config: VllmConfig) -> Iterator[str]:
    parallel = config.parallel_config
    context = parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1
    if context and minor_version(vllm.__version__) < SHARES_TOKENS:
        yield (
            f"it supports context parallelism from vLLM {SHARES_TOKENS[0]}.{SHARES_TOKENS[1]} on; set "
            "decode_context_parallel_size and prefill_context_parallel_size to 1"
        )


def _caches(config: VllmConfig, kv_cache_config: KVCacheConfig | None) -> Iterator[str]:
    device = config.kv_transfer_config.kv_buffer_device
    platform = vllm.platforms.current_platform.device_type
    if device not in (platform, "cpu"):
        yield (
            f"the cache moves from where it is ('{platform}') or by way of host memory ('cpu'), and kv_buffer_device "
            f"'{device}' is neither; set one of those in --kv-transfer-config"
        )
    if getattr(config.cache_config, "calculate_kv_scales", False):
        yield (
            "scales of a quantised cache that each engine calculates for itself differ between engines; remove "
            "--calculate-kv-scales"
        )
    if config.model_config.enable_sleep_mode:
        # From 0.33 on vLLM asks the connector and refuses by itself.
        yield "sleep mode moves the cache in memory, which peers are not told of; remove --enable-sleep-mode"
    if config.model_config.is_encoder_decoder:
        yield "it does not support encoder-decoder models, whose cross attention is cached by the encoder's tokens"
    for number, group in enumerate(kv_cache_config.kv_cache_groups if kv_cache_config else ()):
        if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
            yield f"KV cache group {number} lies in host memory or is a replica of one that does; turn off HiSparse"
    if kv_cache_config:
        yield from dict.fromkeys(reason for spec in layer_specs(kv_cache_config) for reason in _guesses(spec))


def _guesses(spec: Any) -> Iterator[str]:
    """Why the states of a layer cannot be told from those of guesses."""
    if not getattr(spec, "num_speculative_blocks", 0):
        return
    kind, mode = spec.mamba_type.name, spec.mamba_cache_mode
    if kind not in GUESSED_KINDS:
        yield (
            f"vLLM keeps no place in the convolution of {kind} for the inputs of guesses, and so cannot take back a "
            "wrong one; remove --speculative-config"
        )
    if mode not in GUESSED_MODES:
        yield (
            f"with speculative decoding and --mamba-cache-mode {mode} a request's state may lie behind blocks of "
            "guesses; set --mamba-cache-mode align, or remove --speculative-config"
        )


def staged(config: VllmConfig) -> bool:
    """Whether the cache is on a device and moves by way of host memory."""
    platform: str = vllm.platforms.current_platform.device_type
    return config.kv_transfer_config.kv_buffer_device == "cpu" != platform


def fingerprint(config: VllmConfig, model_id: str | None) -> Fingerprint:
    """What must be equal at producer and consumer; shapes and packings are compared layer by layer instead."""
    digest = hashlib.blake2b(digest_size=16)
    for part in _model_parts(config.model_config, model_id):
        digest.update(len(part).to_bytes(8, "little") + part)
    name = model_id or Path(config.model_config.model).name
    software = ".".join(map(str, minor_version(vllm.__version__)))
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
        yield from samples(file)


def samples(file: Path) -> Iterator[bytes]:
    """Of a large file: name, size, and parts from which another one of the same size can be told."""
    size = file.stat().st_size
    yield f"{file.name}:{size}".encode()
    with file.open("rb") as stream:
        for sample in range(_SAMPLES):
            stream.seek(sample * size // _SAMPLES)
            yield stream.read(_SAMPLE_BYTES)
