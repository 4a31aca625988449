"""``kvferry gateway``: bad input is one clear line and exit code 2; good input serves, also with several workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import sys
from pathlib import Path

import aiohttp
import pytest
from typer.testing import CliRunner

from kvferry.cli import app

from .stage import BODIES, run
from .standin import StandIn

PAIR = ["gateway", "--prefill", "http://h:1", "--decode", "http://h:2"]
TEXT = "/v1/completions"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gateway", "--prefill", "h:1", "--decode", "http://h:2"], "'h:1' is not of the form http://host:port"),
        (["gateway", "--prefill", "http://h:1,tp=2", "--decode", "http://h:2"], "is not of the form"),
        (["gateway", "--prefill", "http://h:1/v1", "--decode", "http://h:2"], "is not of the form"),
        (["gateway", "--prefill", "http://u:p@h:1", "--decode", "http://h:2"], "is not of the form"),
        (["gateway", "--prefill", "http://h:99999", "--decode", "http://h:2"], "is not of the form"),
        (["gateway", "--prefill", "http://h:1", "--decode", "http://h:1/"], "http://h:1 is named twice"),
        ([*PAIR, "--api-key-file", "/nowhere"], "/nowhere cannot be read"),
        ([*PAIR, "--secret-file", "/dev/null"], "/dev/null is empty"),
        ([*PAIR, "--secret-file", "/proc/sys/kernel/ostype"], "holds a secret of 5 bytes; at least 16 are needed"),
        ([*PAIR, "--deadline", "0"], "bad setting"),
        ([*PAIR, "--attempts", "99"], "bad setting"),
    ],
)
def test_bad_input_is_refused(arguments, said):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_port_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = CliRunner().invoke(app, [*PAIR, "--port", str(port)])
    assert result.exit_code == 2
    assert f"port {port} on 127.0.0.1 cannot be used" in result.stderr


def test_help_shows_an_example():
    result = CliRunner().invoke(app, ["gateway", "--help"])
    assert "--prefill http://10.0.0.1:8000" in re.sub(r"\s+", " ", result.stdout)


@contextlib.asynccontextmanager
async def _started(*options: str):
    """The command as users run it, with its URL and what it wrote."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from kvferry.cli import main; main()", "gateway", "--port", str(port), *options]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()


async def _ready(client: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with client.get(f"{url}/ready") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.05)


def test_the_command_serves_logs_and_ends_when_told():
    async def scenario():
        ledger: dict = {}
        async with StandIn("prefill", 1, ledger) as prefill, StandIn("decode", 1, ledger) as decode:
            options = ("--prefill", prefill.url, "--decode", decode.url)
            async with _started(*options) as (process, url), aiohttp.ClientSession() as client:
                await _ready(client, url)
                async with client.post(url + TEXT, json=BODIES[TEXT]) as answer:
                    assert answer.status == 200
                process.send_signal(signal.SIGTERM)
                _, said = await process.communicate()
                # uvicorn ends what is under way, and then itself by the signal that it got.
                assert process.returncode == -signal.SIGTERM, said.decode()
                assert f"POST {TEXT} status=200" in said.decode()
            assert decode.fetched == 1

    run(scenario())


def test_workers_share_what_admin_changes_and_add_up_what_they_count(tmp_path: Path):
    key = tmp_path / "key"
    key.write_text("admin")

    async def scenario():
        ledger: dict = {}
        async with StandIn("prefill", 1, ledger) as prefill, StandIn("decode", 1, ledger) as decode:
            options = ("--prefill", prefill.url, "--decode", decode.url, "--workers", "2", "--no-access-log")
            options += ("--admin-key-file", str(key), "--probe-interval", "0.1")
            async with _started(*options) as (_, url), aiohttp.ClientSession() as client:
                await _ready(client, url)
                await _until(client, url, "drain", decode.url, False)
                await _until(client, url, "resume", decode.url, True)
                for _ in range(20):
                    async with client.post(url + TEXT, json=BODIES[TEXT], headers={"Connection": "close"}) as answer:
                        assert answer.status == 200
                # A request is counted when all is done for it, which may be after its answer was read.
                counted = f'kvferry_gateway_requests_total{{path="{TEXT}",status="200"}} 20.0'
                async with asyncio.timeout(30):
                    while counted not in await _metrics(client, url):
                        await asyncio.sleep(0.01)

    run(scenario())


async def _metrics(client: aiohttp.ClientSession, url: str) -> str:
    async with client.get(f"{url}/metrics") as answer:
        return await answer.text()


async def _until(client: aiohttp.ClientSession, url: str, action: str, instance: str, ready: bool) -> None:
    """Tell one worker, and wait until each connection, to whichever worker, sees it."""
    headers = {"Authorization": "Bearer admin", "Connection": "close"}
    async with client.post(f"{url}/admin/{action}", data=json.dumps({"url": instance}), headers=headers) as answer:
        assert answer.status == 200
    agreeing = 0
    async with asyncio.timeout(30):
        while agreeing < 20:
            async with client.get(f"{url}/ready", headers=headers) as answer:
                agreeing = agreeing + 1 if (answer.status == 200) is ready else 0
            await asyncio.sleep(0.01)
