"""What vLLM asks of the connector's class when it loads it; the signatures are in ``tests/versions``."""

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA

from kvferry.vllm.connector import KVFerryConnector
from kvferry.vllm.plugin import register


def test_every_abstract_hook_is_there():
    assert not KVFerryConnector.__abstractmethods__


def test_the_plugin_registers_the_connector_and_may_run_again():
    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name("KVFerryConnector") is KVFerryConnector


def test_the_connector_supports_several_kv_cache_groups():
    assert issubclass(KVFerryConnector, SupportsHMA)
