"""What a gateway is told at its start; plain data, so that it can be handed to worker processes."""

from __future__ import annotations

import os
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from kvferry.errors import GatewayError
from kvferry.protocol.authentication import SECRET_VARIABLE, Seal, seal_with

SETTINGS_VARIABLE = "KVFERRY_GATEWAY"
"""Carries the settings, as JSON, from the command to its worker processes. File names are in it, keys are not."""

MULTIPROCESS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Names the directory where prometheus_client adds up what several processes count."""

Seconds = Annotated[float, Meta(gt=0)]
_INSTANCE = re.compile(r"(https?://[A-Za-z0-9._\-\[\]:]+)/?(?:,dp=([1-9][0-9]{0,3}))?")


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class Policy(StrEnum):
    """How an instance is chosen among those that may be."""

    AFFINITY = "affinity"
    LEAST_LOAD = "least-load"
    ROUND_ROBIN = "round-robin"


class InstanceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One vLLM API server; ``dp`` is its number of data parallel ranks, None to read it from its ``/metrics``."""

    url: str
    role: Role
    dp: Annotated[int, Meta(ge=1, le=4096)] | None = None

    @classmethod
    def parse(cls, text: str, role: Role) -> InstanceSpec:
        """From ``http://host:port`` or ``http://host:port,dp=2``.

        Raises:
            GatewayError: it is neither.
        """
        found = _INSTANCE.fullmatch(text)
        try:
            if found and urlsplit(found[1]).port != 0:
                return cls(found[1], role, int(found[2]) if found[2] else None)
        except ValueError:
            pass  # a port that there is not
        raise GatewayError(f"{text!r} is not of the form http://host:port or http://host:port,dp=2")


class Settings(msgspec.Struct, frozen=True):
    """All settings with their defaults; times in seconds.

    Attributes:
        instances: prefill and decode instances known at the start.
        prefill_policy, decode_policy: see docs/gateway.md.
        attempts: how many instances are tried per leg before the request fails, the first included.
        retry_ratio: retries allowed for each request, on average; ten more in a burst.
        backoff: before the first retry, doubled for each further one.
        streaming: whether both legs are sent at once where the connector can move a prompt while it is computed.
        plain_decode: whether decode may prefill a request itself when no prefill instance can.
        skip_prefill_below: prompts with fewer estimated tokens to compute go straight to decode; 0 turns that off.
        deadline: from a request's arrival to the first byte of its answer (the whole answer where it is not streamed).
        prefill_timeout: for one prefill leg.
        connect_timeout: for a connection to an instance.
        idle_timeout: between two pieces of a streamed answer, and before its head.
        probe_interval, probe_timeout: of the health checks.
        probe_misses: consecutive health checks without an answer after which an instance counts as lost; one that
            refuses connections or says that it is unwell is lost at once.
        breaker_failures: consecutive failures after which a rank is left alone.
        breaker_pause: how long at first; doubled up to 30 s while its trial requests fail.
        max_body_bytes: of a client's request.
        secret_file: the secret that all instances share; it wins over the variable KVFERRY_SECRET.
        api_key_file: keys that clients may show, one a line; without it they need none.
        admin_key_file: keys for /admin; without it there is no /admin.
        engine_key_file: the key that is shown to the instances; without it the client's own, where clients need none.
        shared_file: where worker processes share what was changed through /admin.
    """

    instances: tuple[InstanceSpec, ...] = ()
    prefill_policy: Policy = Policy.AFFINITY
    decode_policy: Policy = Policy.LEAST_LOAD
    attempts: Annotated[int, Meta(ge=1, le=10)] = 2
    retry_ratio: Annotated[float, Meta(ge=0)] = 0.2
    backoff: Seconds = 0.05
    streaming: bool = False
    plain_decode: bool = True
    skip_prefill_below: Annotated[int, Meta(ge=0)] = 0
    deadline: Seconds = 600.0
    prefill_timeout: Seconds = 300.0
    connect_timeout: Seconds = 5.0
    idle_timeout: Seconds = 300.0
    probe_interval: Seconds = 1.0
    probe_timeout: Seconds = 2.0
    probe_misses: Annotated[int, Meta(ge=1)] = 3
    breaker_failures: Annotated[int, Meta(ge=1)] = 5
    breaker_pause: Seconds = 1.0
    max_body_bytes: Annotated[int, Meta(ge=1)] = 64 << 20
    secret_file: str | None = None
    api_key_file: str | None = None
    admin_key_file: str | None = None
    engine_key_file: str | None = None
    shared_file: str | None = None


def read_seal(settings: Settings) -> Seal:
    """What signs releases.

    Raises:
        GatewayError: the secret cannot be read.
        SettingsError: it is too short.
    """
    if settings.secret_file is not None:
        return seal_with(_read(settings.secret_file), f"secret_file {settings.secret_file}")
    secret = os.environb.get(SECRET_VARIABLE.encode())
    return Seal() if secret is None else seal_with(secret, SECRET_VARIABLE)


def read_keys(file: str | None) -> tuple[bytes, ...]:
    """The keys in a file, one a line. Raises ``GatewayError`` when it cannot be read or holds none."""
    return () if file is None else tuple(line.strip() for line in _read(file).splitlines() if line.strip())


def _read(file: str) -> bytes:
    try:
        content = Path(file).read_bytes().rstrip()
    except (OSError, ValueError) as error:
        raise GatewayError(f"{file} cannot be read: {error}") from error
    if not content.strip():
        raise GatewayError(f"{file} is empty")
    return content
