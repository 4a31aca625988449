"""vLLM's NIXL connectors with a pause in NIXL's progress thread.

NIXL's Python wrapper sets the thread's delay to 0, so that it spins: a whole core for each worker, for ever. The
binding lets it be set; only the wrapper offers no argument for it.
"""

import os
import sys
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector, NixlPushConnector
from vllm.distributed.nixl_utils import NixlWrapper

__all__ = ["NixlConnector", "NixlPushConnector"]

VARIABLE = "KVFERRY_PEER_NIXL_DELAY_US"
DELAY_US = 1000


def pause_progress_threads(wrapper: Any, delay_us: int) -> None:
    """Give every agent that this process makes from now on that delay, in microseconds.

    Args:
        wrapper: NIXL's ``nixl_agent``; None where NIXL is not installed, and there is nothing to do.
    """
    if wrapper is None:
        return
    binding = sys.modules[wrapper.__module__].nixlBind
    make = binding.nixlAgent

    def paused(name: str, config: Any) -> Any:
        config.pthrDelay = delay_us
        return make(name, config)

    binding.nixlAgent = paused


pause_progress_threads(NixlWrapper, int(os.environ.get(VARIABLE, DELAY_US)))
