"""The gateway does what its OpenAPI description says, also when it is asked for nonsense."""

import asyncio
import sys

import pytest
from starlette.routing import Route

from kvferry.gateway.app import create_app
from kvferry.gateway.settings import Settings

from .stage import run, stage

EVERYTHING = ["--exclude-path", "/admin/add"]
"""An instance that was added would be probed, wherever it is."""
RUNS = [
    pytest.param("coverage", ["--include-path-regex", "^/ready$"], id="some"),
    pytest.param("coverage,fuzzing", EVERYTHING, id="everything", marks=[pytest.mark.heavy, pytest.mark.timeout(1200)]),
]
ENGINES_PART = "negative_data_rejection,positive_data_acceptance"
"""What a body must hold is the engines' to judge, and stand-ins do not."""


def test_every_route_is_described_and_nothing_else():
    async def scenario():
        async with stage() as s:
            described = (await s.get("/openapi.json")).json["paths"]
        routes = [route for route in create_app(Settings()).routes if isinstance(route, Route)]
        methods = {route.path: {method.lower() for method in route.methods if method != "HEAD"} for route in routes}
        assert {path: set(operations) for path, operations in described.items()} == methods

    run(scenario())


@pytest.mark.parametrize(("phases", "paths"), RUNS)
def test_schemathesis_finds_nothing(phases, paths, tmp_path):
    file = tmp_path / "keys"
    file.write_text("admin")

    async def scenario():
        async with stage(api_key_file=str(file), admin_key_file=str(file), probe_interval=1.0) as s:
            options = [*paths, "--max-examples", "50", "--seed", "1", "--no-color", "--phases", phases]
            options += ["--checks", "all", "--exclude-checks", ENGINES_PART, "--suppress-health-check", "all"]
            options += ["-H", "Authorization: Bearer admin"]
            command = [sys.executable, "-m", "schemathesis.cli", "run", f"{s.url}/openapi.json", *options]
            process = await asyncio.create_subprocess_exec(
                *command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
            )
            said, _ = await process.communicate()
            assert process.returncode == 0, said.decode()[-6000:]

    run(scenario())
