"""The connector against the installed vLLM's base class: names, signatures, and what importing it costs."""

import inspect

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from kvferry.vllm.connector import KVFerryConnector
from kvferry.vllm.plugin import register

OWN = [name for name, value in vars(KVFerryConnector).items() if callable(value) or isinstance(value, classmethod)]
HOOKS = [name for name in OWN if not name.startswith("_")]


def test_every_abstract_hook_is_there():
    assert not KVFerryConnector.__abstractmethods__


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_exists_in_the_base_class_and_takes_what_vllm_passes(name):
    base = getattr(KVConnectorBase_V1, name, None) or getattr(SupportsHMA, name)
    theirs = list(inspect.signature(base).parameters.values())
    ours = inspect.signature(getattr(KVFerryConnector, name)).parameters
    for parameter in theirs:
        assert parameter.name in ours, f"{name} lacks {parameter.name}"
        assert ours[parameter.name].kind == parameter.kind
    extra = set(ours) - {parameter.name for parameter in theirs}
    assert not extra, f"{name} takes {extra}, which vLLM never passes"


def test_the_constructor_takes_the_kv_cache_config():
    assert list(inspect.signature(KVFerryConnector).parameters) == ["vllm_config", "role", "kv_cache_config"]


def test_class_hooks_are_class_methods():
    """vLLM calls them in the API server, where there is no instance."""
    for name in ("get_required_kvcache_layout", "build_kv_connector_stats", "build_prom_metrics"):
        assert isinstance(vars(KVFerryConnector)[name], classmethod)


def test_the_plugin_registers_the_connector_and_may_run_again():
    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name("KVFerryConnector") is KVFerryConnector


def test_the_connector_supports_several_kv_cache_groups():
    assert issubclass(KVFerryConnector, SupportsHMA)
