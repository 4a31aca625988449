"""Which vLLM is served; another one is refused before anything of it is needed."""

import subprocess
import sys

import pytest

from kvferry.errors import UnsupportedError
from kvferry.vllm.versions import minor_version, require_version, supported

ANOTHER = """
import sys, types
sys.modules["vllm"] = types.ModuleType("vllm")  # with nothing that the connector imports
sys.modules["vllm"].__version__ = "0.29.1"
import kvferry.vllm.connector
"""


@pytest.mark.parametrize("version", ["0.30.0", "0.31.2", "0.32.1rc0+cpu", "0.33.0.dev7+g0123abc"])
def test_a_vllm_of_the_window_is_served(version):
    assert supported(version)
    require_version(version)


@pytest.mark.parametrize("version", ["0.29.1", "0.34.0", "1.0.0", "0.3.1", "0.300", "dev", ""])
def test_a_vllm_outside_the_window_is_refused_with_the_window(version):
    with pytest.raises(UnsupportedError, match=rf"vLLM 0\.30 to 0\.33, and this is {version}; install one of those"):
        require_version(version)


def test_versions_are_compared_as_numbers():
    assert minor_version("0.9.2") < minor_version("0.30.0") < minor_version("0.100.0")


def test_another_vllm_is_refused_in_one_line_whatever_it_lacks():
    done = subprocess.run([sys.executable, "-c", ANOTHER], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("kvferry.errors.UnsupportedError: KVFerry works with vLLM 0.30 to")
