"""An asyncio event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

logger = logging.getLogger(__name__)

Tick = Callable[[], float | None]
"""Called once a second or more often; returns seconds until it wants to be called again, None for no wish."""

LONGEST_WAIT_S = 1.0

# A thread that waits in the kernel for anything lets go of the interpreter, and another that takes it may keep it for a
# turn of 5 ms. So whoever wakes a loop does it through PyDLL, which holds on to it; the write never blocks.
_ring = ctypes.PyDLL(None).eventfd_write
_ring.argtypes = (ctypes.c_int, ctypes.c_uint64)


class _Loop(asyncio.SelectorEventLoop):
    """Resolves each name in a daemon thread of its own.

    The threads that asyncio takes for that are few, so names that hang would delay the others, and the interpreter's
    exit waits for them.
    """

    async def getaddrinfo(self, *args: Any, **options: Any) -> Any:
        found: concurrent.futures.Future[Any] = concurrent.futures.Future()
        found.set_running_or_notify_cancel()  # nobody can cancel it any more: the thread always may set it

        def find() -> None:
            try:
                found.set_result(socket.getaddrinfo(*args, **options))
            except Exception as error:
                found.set_exception(error)

        threading.Thread(target=find, name="kvferry-resolve", daemon=True).start()
        return await asyncio.wrap_future(found)


class LoopThread:
    """Runs ``loop`` from ``start`` to ``close``, in a daemon thread.

    Calls from other threads go into a queue, and the first of them rings for all that come before the loop has got
    round to them. This is ``call_soon_threadsafe`` but that it takes a microsecond or two and that the caller never
    waits for the interpreter: callers are an engine's hooks.

    Args:
        name: of the thread.
        tick: called on the thread. After it has raised, it is left alone for a second.
        at_end: called on the thread at last; tasks are cancelled after it.
    """

    def __init__(self, name: str, tick: Tick, at_end: Callable[[], None]) -> None:
        self.loop = _Loop()
        self._tick = tick
        self._at_end = at_end
        self._failed = False
        self._timer: asyncio.Handle = self.loop.call_soon(self._tick_now)
        self._calls: deque[Callable[[], object]] = deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._rung = False
        self.loop.add_reader(self._bell, self._take_calls)
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, *tasks: Coroutine[Any, Any, None]) -> None:
        """Start the thread, with these as its first tasks."""
        self._tasks = [self.loop.create_task(task) for task in tasks]
        self._thread.start()

    def call(self, function: Callable[[], object]) -> bool:
        """Have a function called on the thread, from any thread, in order; False if it never will be: closed."""
        with self._lock:  # so that nothing comes in behind the call that stops the loop
            if not self._closed:
                self._put(function)
            return not self._closed

    def _put(self, function: Callable[[], object]) -> None:
        self._calls.append(function)
        if not self._rung:
            self._rung = True
            _ring(self._bell, 1)

    def _take_calls(self) -> None:
        os.eventfd_read(self._bell)
        self._rung = False  # first: who comes from now on rings again
        for _ in range(len(self._calls)):
            self.loop.call_soon(self._calls.popleft())

    def close(self) -> None:
        """Stop, and wait for that. Safe to call twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._put(self.loop.stop)
        self._thread.join(timeout=5)

    def tick(self) -> None:
        """Call ``tick`` now; on the thread only."""
        if not self._failed:
            self._tick_now()

    def _tick_now(self) -> None:
        self._timer.cancel()
        try:
            wish = self._tick()
            self._failed = False
        except Exception:
            logger.exception("a KVFerry side channel goes on after an error")
            wish, self._failed = None, True
        wait = LONGEST_WAIT_S if wish is None else min(LONGEST_WAIT_S, max(0.0, wish))
        self._timer = self.loop.call_later(wait, self._tick_now)

    def _run(self) -> None:
        # A thread that is woken takes the core of the one that woke it where no other is free, and that one is in an
        # engine's hook. A batch thread waits for a core instead.
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.get_loop().run_forever()
            self._at_end()
            self.loop.remove_reader(self._bell)
            os.close(self._bell)
