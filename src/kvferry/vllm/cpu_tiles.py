"""Permission to use AMX tiles, for engines on CPUs that have them.

A process has to ask Linux for it once, or its first tile instruction ends it with SIGILL (see arch_prctl(2)).
oneDNN asks when it computes a long prompt in bfloat16. vLLM 0.32's attention kernel takes it for granted, so that an
engine whose first step is a single token after a loaded prompt would die.
"""

import ctypes
import platform

ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18


def ask_for_tiles() -> None:
    """Harmless where there are no tiles: then the kernel refuses."""
    if platform.system() == "Linux" and platform.machine() == "x86_64":
        ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA)
