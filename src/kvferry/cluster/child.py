"""A process with a NIXL agent, or what else must not share this one's fate: the handle on it, and its own loop.

One line of JSON in, one line of JSON out; the end of its input ends it.
"""

import asyncio
import contextlib
import importlib.metadata
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from kvferry.errors import KVFerryError, TransferError

START_S = 60.0
ANSWER_S = 90.0
END_S = 20.0
DESTROY_S = 10
MOST_BYTES = 1 << 24
LOG_PATTERN = "ucx-*.log"


def ucx_log(directory: Path, level: str) -> dict[str, str]:
    """Variables that have UCX write to files there: with ``debug`` all transports, in any case those it has used."""
    return {"UCX_LOG_LEVEL": level, "UCX_PROTO_INFO": "used", "UCX_LOG_FILE": str(directory / "ucx-%p.log")}


class Child:
    """One process; made by ``running``."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def start(cls, module: str, *arguments: str, variables: Mapping[str, str]) -> Self:
        return cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, *arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env={**os.environ, **variables},
                limit=MOST_BYTES,
                start_new_session=True,  # Ctrl-C is for its parent, which then ends it
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

        An agent's destructor can hang; see ``_end``.
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
async def running(
    module: str, *arguments: str, variables: Mapping[str, str] | None = None, let_end: bool = False
) -> AsyncIterator[Child]:
    """A module that calls ``serve``, as a process that is gone afterwards, however that came.

    Args:
        variables: added to its environment.
        let_end: it may end by itself, which UCX needs to write down what it has used.
    """
    child = await Child.start(module, *arguments, variables=variables or {})
    try:
        yield child
        if let_end:
            await child.finish()
    finally:
        await child.kill()


def serve(make: Callable[[], Callable[[dict[str, Any]], Any]]) -> None:
    """The loop of such a process: what ``make`` returns gives the answer to each request, anything msgspec encodes."""
    _spare_torch()
    try:
        answer = make()
    except KVFerryError as error:
        _say({"error": str(error)})
        return
    for line in sys.stdin:
        try:
            said = answer(msgspec.json.decode(line, type=dict[str, Any]))
        except Exception as error:  # whatever a peer has sent, the other side of the pipe gets its answer
            said = {"error": str(error) or type(error).__name__}
        _say(said)
    _end()


def _say(what: Any) -> None:
    print(msgspec.json.encode(what).decode(), flush=True)


def _spare_torch() -> None:
    """Keep NIXL from importing a CPU build of torch, for a second, only to find that it names no CUDA version.

    NIXL then takes whatever build of its own is installed, as it does after having looked.
    """
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if importlib.metadata.version("torch").endswith("+cpu"):
            sys.modules.setdefault("torch", None)  # type: ignore[arg-type]


def _end() -> None:
    """The agent's destructor was seen to hang, so it runs only where UCX is to write down what it has used."""
    sys.stdout.flush()
    if "UCX_LOG_FILE" not in os.environ:
        os._exit(0)
    signal.alarm(DESTROY_S)
