"""Objects in processes of their own: a module whose last line is ``run(Class)``, and the handle on what it made."""

import resource
import time
import typing
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
import psutil

from kvferry.cluster.child import START_S, Child, running, serve

T = TypeVar("T")


class Usage(msgspec.Struct, frozen=True):
    """Of one process since its start: processor time of all its threads, and memory now."""

    cpu_s: float
    rss_bytes: int


class Role:
    """What such a class derives from. Public methods are called from outside, with arguments of the annotated types."""

    def usage(self) -> Usage:
        return Usage(time.process_time(), psutil.Process().memory_info().rss)


class Remote:
    """Calls methods of an object in another process."""

    def __init__(self, child: Child) -> None:
        self._child = child

    async def call(self, method: str, result: type[T], **arguments: Any) -> T:
        """Raises:
        TransferError: the method raised, or the process died or does not answer.
        """
        said = await self._child.ask(method, **arguments)
        return msgspec.convert(said["value"], result)


@asynccontextmanager
async def made(role: type[Role], variables: Mapping[str, str] | None = None, **arguments: Any) -> AsyncIterator[Remote]:
    """An object of that class in a process that ends with the context."""
    # Idle threads of a linear algebra library would take turns with what is measured.
    async with running(role.__module__, variables={"OPENBLAS_NUM_THREADS": "1", **(variables or {})}) as child:
        await child.ask("make", START_S, **arguments)
        yield Remote(child)


def run(role: type[Role]) -> None:
    """The whole life of such a process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    there: list[Role] = []

    def answer(request: dict[str, Any]) -> Any:
        method = request.pop("do")
        if method == "make":
            there.append(role(**_typed(role.__init__, request)))
            return {}
        function: Callable[..., Any] = getattr(there[0], method)
        return {"value": function(**_typed(function, request))}

    serve(lambda: answer)


def _typed(function: Callable[..., Any], values: dict[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(function)
    return {name: msgspec.convert(value, hints[name]) for name, value in values.items()}
