"""The connector on engines of the CPU build that take their cache for a device's: it moves by way of a copy in another
part of the same memory.

Loaded by name: ``kv_connector_module_path``.
"""

from kvferry.vllm import connector

KVFerryConnector = connector.KVFerryConnector
connector.staged = lambda config: True
