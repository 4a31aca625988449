"""Names nobody can guess, and the identity of the tokens a KV cache was computed from."""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Iterable, Sequence

CHUNK = 255
"""Tokens hashed at a time. From 2,048 bytes on, hashlib lets go of the interpreter, which a producer's hook would then
wait to get back."""


def draw() -> str:
    """128 random bits in hex: an incarnation, a nonce or a claim."""
    return secrets.token_hex(16)


def token_identity(tokens: Sequence[int], extras: Iterable[str] = ()) -> str:
    """Digest of what decides a KV cache: the token ids, and whatever else the values depend on.

    Args:
        tokens: token ids, in order.
        extras: an adapter's name, hashes of multimodal inputs and where they lie.

    Returns:
        32 hex digits (BLAKE2b, 128 bits). Parameters used with another prompt of the same length would otherwise
        load that prompt's cache.
    """
    digest = hashlib.blake2b(digest_size=16)
    for start in range(0, len(tokens), CHUNK):
        chunk = tokens[start : start + CHUNK]
        digest.update(struct.pack(f"<{len(chunk)}q", *chunk))
    for extra in extras:
        text = extra.encode()
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
    return digest.hexdigest()
