"""What can be set in ``kv_connector_extra_config``."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvferry.errors import SettingsError
from kvferry.protocol.authentication import SECRET_VARIABLE, Seal, seal_with
from kvferry.protocol.messages import Lease
from kvferry.transport.nixl import PROGRESS_DELAY_US

Seconds = Annotated[float, Meta(gt=0)]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All keys, with their defaults.

    Attributes:
        side_channel_host: address the listener binds and advertises; None for vLLM's own rule (VLLM_HOST_IP, else
            the address of the default route).
        side_channel_port: base port, to which the data parallel index is added; 0 lets the system choose.
        kv_lease_duration: seconds that a finished prefill is held without a claim, or a claim without renewal.
        claim_timeout: seconds a decode request waits for the producer's answer before it is computed locally.
        hold_timeout: seconds a claimed prefill may wait for blocks at the decode side before it is given back and the
            prompt computed there; and seconds that blocks there may wait for a prefill under way that does not go on.
        handshake_timeout: seconds a worker waits for a producer's description of itself.
        read_timeout: seconds after which a read that has not ended is called overdue: it is logged and counted, nothing
            more is read from its producer meanwhile, and its blocks stay held until it does end.
        ack_timeout: seconds a worker waits for the producer's word that what it read was still held.
        nixl_progress_delay_us: pause of NIXL's progress thread, in microseconds; 0 spins one core per worker.
        backends: the NIXL plugin to use (one).
        backend_params: its options.
        streaming: for routers that send both legs of a request at once with one X-Request-Id, as vllm-router does for
            vLLM's push mode: every prefill can be claimed under that id from its arrival on. At prefill.
        secret_file: a file with the secret that all instances share; it wins over the variable KVFERRY_SECRET.
        allow_public_peers: without a secret, also talk to addresses that are not private.
        model_id: names the model where prefill and decode know it under different paths.
    """

    side_channel_host: str | None = None
    side_channel_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    kv_lease_duration: Lease = 30.0
    claim_timeout: Seconds = 10.0
    hold_timeout: Seconds = 300.0
    handshake_timeout: Seconds = 10.0
    read_timeout: Seconds = 60.0
    ack_timeout: Seconds = 10.0
    nixl_progress_delay_us: Annotated[int, Meta(ge=0)] = PROGRESS_DELAY_US
    backends: Annotated[list[str], Meta(min_length=1, max_length=1)] = msgspec.field(default_factory=lambda: ["UCX"])
    backend_params: dict[str, str] = msgspec.field(default_factory=dict)
    streaming: bool = False
    secret_file: str | None = None
    allow_public_peers: bool = False
    model_id: str | None = None


def parse_settings(extra_config: dict[str, Any]) -> Settings:
    """Check ``kv_connector_extra_config``.

    Raises:
        SettingsError: an unknown key (the nearest known one is named) or a value out of bounds.
    """
    known = [field.name for field in msgspec.structs.fields(Settings)]
    for key in extra_config:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known keys are {', '.join(known)}"
            raise SettingsError(f"kv_connector_extra_config has an unknown key '{key}': {hint}")
    try:
        return msgspec.convert(extra_config, Settings)
    except msgspec.ValidationError as error:
        raise SettingsError(f"kv_connector_extra_config: {error}") from error


def read_seal(settings: Settings) -> Seal:
    """What signs for this engine: with the secret of ``secret_file``, else of ``KVFERRY_SECRET``, else with nothing.

    Each process of an engine reads it for itself, so that it is in no configuration that is printed or passed on.

    Raises:
        SettingsError: the file cannot be read, or a secret is empty or shorter than 16 bytes.
    """
    if settings.secret_file is not None:
        source = f"secret_file {settings.secret_file}"
        try:
            secret = Path(settings.secret_file).read_bytes()
        except (OSError, ValueError) as error:
            raise SettingsError(f"{source} cannot be read: {error}") from error
    elif SECRET_VARIABLE in os.environ:
        source = SECRET_VARIABLE
        secret = os.environb[SECRET_VARIABLE.encode()]
    else:
        return Seal(allow_public=settings.allow_public_peers)
    return seal_with(secret, source)
