"""What absolute figures depend on, and ratios of one run do not."""

import os


def load() -> float:
    """Processes that want to run, averaged over a minute."""
    return os.getloadavg()[0]


def cores() -> int:
    return len(os.sched_getaffinity(0))
