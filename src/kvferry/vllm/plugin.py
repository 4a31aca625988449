"""The ``vllm.general_plugins`` entry point: vLLM calls `register` in each of its processes."""

import contextlib
import logging

from kvferry.vllm.cpu_tiles import ask_for_tiles
from kvferry.vllm.cpu_yield import honour_variable

logger = logging.getLogger(__name__)


def register() -> None:
    """Make ``KVFerryConnector`` known to vLLM by name; never raises, and may be called again."""
    try:
        honour_variable()
        ask_for_tiles()
        _register_connector()
    except Exception:
        logger.exception("kvferry: the vLLM plugin could not register")


def _register_connector() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # registered already
        KVConnectorFactory.register_connector("KVFerryConnector", "kvferry.vllm.connector", "KVFerryConnector")
