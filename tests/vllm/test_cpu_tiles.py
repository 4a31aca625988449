"""Permission for AMX tiles, where the processor has them."""

import ctypes
from pathlib import Path

import pytest

from kvferry.vllm.cpu_tiles import ARCH_PRCTL, TILE_DATA, ask_for_tiles

GET_PERMISSION = 0x1022


@pytest.mark.skipif("amx_tile" not in Path("/proc/cpuinfo").read_text(), reason="the processor has no AMX")
def test_a_process_may_use_tiles_after_asking():
    ask_for_tiles()
    granted = ctypes.c_uint64()
    assert ctypes.CDLL(None).syscall(ARCH_PRCTL, GET_PERMISSION, ctypes.byref(granted)) == 0
    assert granted.value >> TILE_DATA & 1


def test_asking_again_is_harmless():
    ask_for_tiles()
    ask_for_tiles()
