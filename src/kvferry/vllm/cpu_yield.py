"""The opt-in that keeps vLLM responsive on a machine with fewer cores than engine processes.

Processes of one engine wait for each other in loops around ``sched_yield``: vLLM's message queues from Python, its
tensor parallel communicator and UCX from C++. Beside a thread that does not yield, such a loop can be put off for very
long, and on some kernels (seen on 6.18) a few of them stall a whole small machine for half a minute, longer than a
lease. Launchers ask for the cure with an environment variable; the connector never does it silently.
"""

import ctypes
import functools
import logging
import os
import platform
import time

VARIABLE = "KVFERRY_CPU_YIELD_SLEEP_US"

logger = logging.getLogger(__name__)

# The machine's name for itself: AUDIT_ARCH_* and the number of sched_yield there (linux/audit.h, asm/unistd.h).
_SCHED_YIELD = {"x86_64": (0xC000003E, 24), "aarch64": (0xC00000B7, 124)}
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # classic BPF: ld [k]; jeq k, jt, jf; ret k
_ERRNO_0, _ALLOW = 0x00050000, 0x7FFF0000


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def soften_sched_yield(microseconds: float) -> None:
    """Make Python's ``os.sched_yield`` sleep for that many microseconds, in this process."""
    seconds = microseconds / 1e6

    def sched_yield() -> None:
        time.sleep(seconds)

    os.sched_yield = sched_yield


@functools.cache  # plugins are registered several times per process
def ignore_sched_yield() -> None:
    """Let the system call ``sched_yield`` return at once, in this thread and all threads and processes it starts.

    A loop around it then spins within its fair share of a core, which no kernel puts off. Done with a seccomp filter,
    so it reaches C++ code, cannot be undone, and forbids gaining privileges (no setuid programs).

    Raises:
        OSError: the kernel does not allow it, or the machine's architecture is not known here.
    """
    if platform.machine() not in _SCHED_YIELD:
        raise OSError(f"the number of sched_yield on {platform.machine()} is not known")
    architecture, number = _SCHED_YIELD[platform.machine()]
    rows = [
        (_LOAD, 0, 0, 4),  # struct seccomp_data: the architecture is at offset 4, the system call's number at 0
        (_JUMP_IF_EQUAL, 0, 3, architecture),
        (_LOAD, 0, 0, 0),
        (_JUMP_IF_EQUAL, 0, 1, number),
        (_RETURN, 0, 0, _ERRNO_0),
        (_RETURN, 0, 0, _ALLOW),
    ]
    instructions = (_Instruction * len(rows))(*(_Instruction(*row) for row in rows))
    program = _Program(len(rows), instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "cannot filter sched_yield")


def honour_variable() -> None:
    """Apply both cures if the variable is set and vLLM runs on its CPU platform.

    Raises:
        ValueError: the variable is not a number.
    """
    asked = os.environ.get(VARIABLE)
    if not asked:
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    soften_sched_yield(float(asked))
    try:
        ignore_sched_yield()
    except OSError as error:
        logger.warning("%s is set, but C++ code goes on yielding: %s", VARIABLE, error)
