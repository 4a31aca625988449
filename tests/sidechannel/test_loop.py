"""The thread under both ends of a side channel."""

import os
import queue
import sys
import threading
from functools import partial

import pytest

from kvferry.sidechannel.loop import LoopThread

from .peers import DEADLINE_S

A_TURN_S = 1.0  # longer than a burst, and not for ever: whoever waits for another thread to let go waits so long


@pytest.fixture
def thread():
    thread = LoopThread("test-loop", lambda: None, lambda: None)
    thread.start()
    yield thread
    thread.close()


def _burst(thread: LoopThread, calls: int) -> int:
    """How many of so many calls had run when the last of them had been handed over."""
    ran, done = [], threading.Event()
    thread.call(done.set)
    assert done.wait(DEADLINE_S)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(A_TURN_S)  # another thread runs only if this one lets go of the interpreter by itself
    try:
        for number in range(calls):
            thread.call(partial(ran.append, number))
        meanwhile = len(ran)
    finally:
        sys.setswitchinterval(interval)
    done.clear()
    thread.call(done.set)
    assert done.wait(DEADLINE_S)
    assert ran == list(range(calls))
    return meanwhile


def test_whoever_calls_keeps_the_interpreter_meanwhile(thread):
    """Else an engine's hook waits for it, up to a turn of 5 ms."""
    # In one of a few: the thread may already have been waiting for the interpreter when a burst began.
    assert min(_burst(thread, 2000) for _ in range(5)) == 0


def test_the_thread_takes_no_core_from_whoever_wakes_it(thread):
    policies = queue.SimpleQueue()
    thread.call(lambda: policies.put(os.sched_getscheduler(0)))
    assert policies.get(timeout=DEADLINE_S) == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_calls_before_the_end_are_made_and_calls_after_it_refused(thread):
    ran = []
    assert all(thread.call(partial(ran.append, number)) for number in range(100))
    thread.close()
    assert ran == list(range(100))
    assert not thread.call(partial(ran.append, 100))


def test_a_call_that_raises_hinders_no_other(thread, caplog):
    done = threading.Event()
    thread.call(partial(int, "no number"))
    thread.call(done.set)
    assert done.wait(DEADLINE_S)
    assert "no number" in caplog.text
