"""Names nobody can guess, and the identity of the tokens a KV cache was computed from."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Sequence

import numpy as np


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
    digest = hashlib.blake2b(np.asarray(tokens, dtype="<i8").tobytes(), digest_size=16)
    for extra in extras:
        text = extra.encode()
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
    return digest.hexdigest()
