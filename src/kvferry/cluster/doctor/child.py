"""The handle on an ``endpoint.py`` process."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from kvferry.errors import TransferError

START_S = 60.0
ANSWER_S = 90.0
END_S = 20.0
MOST_BYTES = 1 << 20
LOG_PATTERN = "ucx-*.log"


def ucx_log(directory: Path, level: str) -> dict[str, str]:
    """Variables that have UCX write to files there: with ``debug`` all transports, in any case those it has used."""
    return {"UCX_LOG_LEVEL": level, "UCX_PROTO_INFO": "used", "UCX_LOG_FILE": str(directory / "ucx-%p.log")}


class Child:
    """One endpoint; made by ``running``."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def start(cls, size: int, variables: Mapping[str, str]) -> Self:
        return cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "kvferry.cluster.doctor.endpoint", str(size)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env={**os.environ, **variables},
                limit=MOST_BYTES,
            )
        )

    async def ask(self, do: str, deadline_s: float = ANSWER_S, **more: Any) -> dict[str, Any]:
        """Raises:
        TransferError: it could not do it, died, or did not answer in time.
        """
        assert self._process.stdin
        try:
            async with asyncio.timeout(deadline_s):
                self._process.stdin.write(msgspec.json.encode({"do": do, **more}) + b"\n")
                await self._process.stdin.drain()
                said = await self._answer()
        except TimeoutError as error:
            raise TransferError(f"no answer to {do!r} within {deadline_s:.0f} s") from error
        except (OSError, ValueError) as error:
            raise TransferError(f"the process with the NIXL agent failed: {error}") from error
        if "error" in said:
            raise TransferError(str(said["error"]))
        return said

    async def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        while line := await self._process.stdout.readline():
            if line.startswith(b"{"):  # anything else was printed by a library
                return msgspec.json.decode(line, type=dict[str, Any])
        code = await self._process.wait()
        how = f"was ended by signal {-code}" if code < 0 else f"ended with {code}"
        raise TransferError(f"the process with the NIXL agent {how}")

    async def finish(self) -> None:
        """Let it end by itself, since only then does UCX write down what it has used; not for longer than a while.

        An agent's destructor can hang; see ``endpoint.py``.
        """
        assert self._process.stdin
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._process.wait()

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


@contextlib.asynccontextmanager
async def running(size: int, variables: Mapping[str, str] | None = None) -> AsyncIterator[Child]:
    """An endpoint that has started, and is gone afterwards, however that came; it writes logs if `variables` say so."""
    child = await Child.start(size, variables or {})
    try:
        yield child
        if variables:
            await child.finish()
    finally:
        await child.kill()
