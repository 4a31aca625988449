"""The opt-in that keeps vLLM's message queues responsive on a machine with few cores.

vLLM's queues wait in an ``os.sched_yield`` loop, which starves beside any spinning thread where there are fewer cores
than engine processes. A short sleep instead makes small CPU engines ten times quicker. Launchers ask for it with an
environment variable; the connector never does it silently.
"""

import os
import time

VARIABLE = "KVFERRY_CPU_YIELD_SLEEP_US"


def soften_sched_yield(microseconds: float) -> None:
    """Make ``os.sched_yield`` sleep for that many microseconds, in this process."""
    seconds = microseconds / 1e6

    def sched_yield() -> None:
        time.sleep(seconds)

    os.sched_yield = sched_yield


def honour_variable() -> None:
    """Soften ``os.sched_yield`` if the variable is set and vLLM runs on its CPU platform.

    Raises:
        ValueError: the variable is not a number.
    """
    asked = os.environ.get(VARIABLE)
    if not asked:
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        soften_sched_yield(float(asked))
