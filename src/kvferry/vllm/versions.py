"""The versions of vLLM that this is written for; here to be read where vLLM is not to be imported."""

import re

from kvferry.errors import UnsupportedError

OLDEST, NEWEST = (0, 30), (0, 33)
"""Minor versions between which the connector API is the one this is written for. 0.30 brought the failure report that
works with any number of KV cache groups and the cache views this reads."""

WINDOW = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def minor_version(version: str) -> tuple[int, int]:
    """(0, 32) of 0.32.0 and of 0.32.1rc0+cpu; what is no version counts as before all."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def supported(version: str) -> bool:
    """Whether a version of vLLM is in the window, ends included."""
    return OLDEST <= minor_version(version) <= NEWEST


def require_version(version: str) -> None:
    """Refuse a vLLM outside the window.

    Raises:
        UnsupportedError: it is.
    """
    if not supported(version):
        raise UnsupportedError(f"KVFerry works with vLLM {WINDOW}, and this is {version}; install one of those")
