"""``kvferry gateway``: one OpenAI-compatible address in front of prefill and decode instances."""

import contextlib
import logging
import os
import resource
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from kvferry.cli.console import examples, out, reported_errors
from kvferry.cluster.ports import require_free
from kvferry.errors import GatewayError
from kvferry.gateway.settings import (
    MULTIPROCESS_VARIABLE,
    SETTINGS_VARIABLE,
    InstanceSpec,
    Policy,
    Role,
    Settings,
    read_keys,
    read_seal,
)

DEFAULTS = Settings()
BACKLOG = 4096
GRACE_S = 30
EXAMPLE = examples(
    "kvferry gateway --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000",
    "kvferry gateway --prefill URL --decode URL,dp=2 --api-key-file keys",
)
INSTANCE_HELP = "URL of {} instance; repeat for several. ',dp=2' names its data parallel ranks; else /metrics tells."


def gateway(
    prefill: Annotated[list[str], typer.Option(help=INSTANCE_HELP.format("a prefill"))],
    decode: Annotated[list[str], typer.Option(help=INSTANCE_HELP.format("a decode"))],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8080,
    workers: Annotated[int, typer.Option(help="Worker processes.", min=1, max=256)] = 1,
    secret_file: Annotated[Path | None, typer.Option(help="The secret that all instances share.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="Keys for clients, one a line; without it: none.")] = None,
    admin_key_file: Annotated[Path | None, typer.Option(help="Keys for /admin; without it there is none.")] = None,
    engine_key_file: Annotated[Path | None, typer.Option(help="The key that the instances want to see.")] = None,
    prefill_policy: Annotated[Policy, typer.Option(help="How a prefill rank is chosen.")] = DEFAULTS.prefill_policy,
    decode_policy: Annotated[Policy, typer.Option(help="How a decode rank is chosen.")] = DEFAULTS.decode_policy,
    streaming: Annotated[bool, typer.Option(help="Move prompts while they are computed.")] = DEFAULTS.streaming,
    plain_decode: Annotated[bool, typer.Option(help="Let decode prefill when no prefill instance can.")] = True,
    skip_prefill_below: Annotated[int, typer.Option(help="Tokens; shorter prompts go to decode. 0: none do.")] = 0,
    attempts: Annotated[int, typer.Option(help="Instances tried per leg.")] = DEFAULTS.attempts,
    deadline: Annotated[float, typer.Option(help="Seconds to the first byte of an answer.")] = DEFAULTS.deadline,
    prefill_timeout: Annotated[float, typer.Option(help="Seconds for a prefill leg.")] = DEFAULTS.prefill_timeout,
    idle_timeout: Annotated[float, typer.Option(help="Seconds between pieces of a stream.")] = DEFAULTS.idle_timeout,
    probe_interval: Annotated[float, typer.Option(help="Seconds between health checks.")] = DEFAULTS.probe_interval,
    access_log: Annotated[bool, typer.Option(help="A line for each request, on standard error.")] = True,
) -> None:
    """Serve prefill and decode instances under one OpenAI-compatible address."""
    with reported_errors():
        settings = _checked(
            instances=_instances(prefill, decode),
            prefill_policy=prefill_policy,
            decode_policy=decode_policy,
            streaming=streaming,
            plain_decode=plain_decode,
            skip_prefill_below=skip_prefill_below,
            attempts=attempts,
            deadline=deadline,
            prefill_timeout=prefill_timeout,
            idle_timeout=idle_timeout,
            probe_interval=probe_interval,
            secret_file=_name(secret_file),
            api_key_file=_name(api_key_file),
            admin_key_file=_name(admin_key_file),
            engine_key_file=_name(engine_key_file),
        )
        if host in ("127.0.0.1", "localhost"):
            require_free(port)
        _serve(settings, host, port, workers, access_log)


def _name(file: Path | None) -> str | None:
    return str(file.absolute()) if file else None


def _instances(prefill: Sequence[str], decode: Sequence[str]) -> list[InstanceSpec]:
    """Raises ``GatewayError`` for a text that is no instance, or one that is named twice."""
    specs = [InstanceSpec.parse(text, Role.PREFILL) for text in prefill]
    specs += [InstanceSpec.parse(text, Role.DECODE) for text in decode]
    urls = [spec.url for spec in specs]
    for url in urls:
        if urls.count(url) > 1:
            raise GatewayError(f"{url} is named twice")
    return specs


def _checked(**values: Any) -> Settings:
    """Settings within their bounds, with files that can be read.

    Raises:
        GatewayError: they are not.
        SettingsError: the secret is too short.
    """
    try:
        settings = msgspec.convert(values, Settings)
    except msgspec.ValidationError as error:
        raise GatewayError(f"bad setting: {error}") from error
    read_seal(settings)
    for file in (settings.api_key_file, settings.admin_key_file, settings.engine_key_file):
        read_keys(file)
    return settings


def _serve(settings: Settings, host: str, port: int, workers: int, access_log: bool) -> None:
    import uvicorn  # takes a while, and bad input should be told at once

    _open_many_files()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("kvferry.access").setLevel(logging.INFO if access_log else logging.WARNING)
    with contextlib.ExitStack() as stack:
        if workers > 1:
            shared = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-gateway-"))
            settings = msgspec.structs.replace(settings, shared_file=f"{shared}/instances")
            os.environ[MULTIPROCESS_VARIABLE] = shared
        os.environ[SETTINGS_VARIABLE] = msgspec.json.encode(settings).decode()
        out.print(f"serving on http://{host}:{port}", markup=False)
        uvicorn.run(
            "kvferry.gateway.app:from_environment",
            factory=True,
            host=host,
            port=port,
            workers=workers,
            loop="uvloop",
            http="httptools",
            backlog=BACKLOG,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            log_level="warning",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=GRACE_S,
        )


def _open_many_files() -> None:
    """A request takes up to three connections; the usual soft limit of 1,024 files is for programs that use select."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
