"""Runs one command and lets nothing of it outlive whoever asked for it: ``python -m kvferry.cluster.guard COMMAND...``

An engine is a tree of processes, and a tree whose root is killed lives on. The guard is the parent of that tree, and
adopts its orphans (it is a child subreaper). Standard input is its lifeline: when the other end closes, because the
supervisor closed it or died in whatever way, or on SIGTERM, or when the command ends, the guard asks the command to
end, waits for a grace period, and then kills every descendant. It exits with the command's code.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil

GRACE_VARIABLE = "KVFERRY_GUARD_GRACE_S"
GRACE_S = 10.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _until_end(command: subprocess.Popen[bytes], wakeup: int) -> None:
    """Return when the command ended, the lifeline closed, or a signal asked for the end."""
    lifeline, ended = sys.stdin.fileno(), os.pidfd_open(command.pid)
    try:
        while not select.select([lifeline, ended, wakeup], [], [])[0]:
            pass
    finally:
        os.close(ended)


def _end(command: subprocess.Popen[bytes], grace_s: float) -> int:
    command.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        command.wait(grace_s)
    _kill_descendants()
    return command.wait()


def _kill_descendants() -> None:
    # Again until there are none: one that is being killed may just have forked, and orphans arrive meanwhile.
    while descendants := psutil.Process().children(recursive=True):
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(descendants, timeout=1.0)
        _reap_orphans()
        time.sleep(0.01)


def _reap_orphans() -> None:
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
            if process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)


def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit code, 128 + the signal's number where a signal ended it."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    grace_s = float(os.environ.pop(GRACE_VARIABLE, GRACE_S))
    try:
        command = subprocess.Popen(argv, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    except OSError as error:
        print(f"OSError: cannot run {argv[0]}: {error.strerror}", file=sys.stderr)
        return 127
    _until_end(command, reading)
    code = _end(command, grace_s)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
