"""Which adapter a KV cache was computed with: two of one name are two, one under two paths is one."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.protocol.identity import draw, token_identity
from kvferry.vllm.compat import samples

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

FILES = ("adapter_config.json", "*.safetensors", "*.bin", "*.pt")

_Key = tuple[str, int, str]
_seen: dict[_Key, tuple[list[int], str]] = {}
"""What the files were when an adapter was first met: modification times, and the digest."""


def adapter_identity(adapter: LoRARequest) -> str:
    """Digest of an adapter's files; of its name and path where that is no directory here.

    vLLM goes on with the weights that it read first, unless it is told to read them again. So nothing can be said of
    files that have changed since, and the answer is one that no other engine gives.
    """
    key = (adapter.lora_name, adapter.lora_int_id, adapter.lora_path)
    try:
        files = sorted({file for pattern in FILES for file in Path(adapter.lora_path).glob(pattern)})
        times = [file.stat().st_mtime_ns for file in files]
        if key not in _seen or adapter.load_inplace:
            _seen[key] = times, _digest(files) if files else token_identity([], key[::2])
    except OSError:
        return draw()
    first, digest = _seen[key]
    return digest if times == first else draw()


def _digest(files: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in (part for file in files for part in samples(file)):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
