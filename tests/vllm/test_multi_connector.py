"""The connector as a child of vLLM's own MultiConnector, beside one that offloads: what the parent does to children."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvferry.vllm import compat
from kvferry.vllm import scheduler as module
from kvferry.vllm.metadata import StepMetadata
from kvferry.vllm.metrics import TransferStats
from kvferry.vllm.plugin import register

PROMPT = list(range(300))
BLOCKS = ([3, 4, 5],)


@dataclass
class Foreign(KVConnectorHandshakeMetadata):
    """Of the other child."""


class Offloading(KVConnectorBase_V1, SupportsHMA):
    """Keeps every finished request's blocks for a while, and has something of every prompt."""

    tokens = 0

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return self.tokens, bool(self.tokens)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def build_connector_meta(self, scheduler_output):
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request, block_ids):
        return True, {"offloaded": True}

    def set_xfer_handshake_metadata_pp_aware(self, metadata):
        pass

    def get_handshake_metadata(self):
        return Foreign()

    def start_load_kv(self, forward_context, **kwargs):
        pass

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass


@pytest.fixture
def make_parent(monkeypatch):
    monkeypatch.setattr(module, "get_ip", lambda: "127.0.0.1")
    monkeypatch.setattr(compat.vllm.platforms.current_platform, "device_type", "cpu")
    register()
    if "Offloading" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("Offloading", __name__, "Offloading")
    parents = []

    def make(role="kv_both", order=("KVFerryConnector", "Offloading")):
        children = [{"kv_connector": name, "kv_role": role, "kv_buffer_device": "cpu"} for name in order]
        transfer = KVTransferConfig(
            kv_connector="MultiConnector", kv_role=role, kv_connector_extra_config={"connectors": children}
        )
        sizes = ("tensor", "pipeline", "decode_context", "prefill_context")
        parallel = {"data_parallel_index": 0, **{f"{axis}_parallel_size": 1 for axis in sizes}}
        config = SimpleNamespace(
            kv_transfer_config=transfer,
            parallel_config=SimpleNamespace(**parallel),
            cache_config=SimpleNamespace(),
            model_config=SimpleNamespace(is_encoder_decoder=False, enable_sleep_mode=False),
            scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        )
        groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace())]
        parents.append(MultiConnector(config, KVConnectorRole.SCHEDULER, SimpleNamespace(kv_cache_groups=groups)))
        return parents[-1]

    yield make
    for parent in parents:
        parent.shutdown()


def _request(name, params):
    return Request(name, list(PROMPT), SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params}), None)


def _prefill(parent, name="p-1"):
    request = _request(name, {"do_remote_decode": True})
    parent.on_new_request(request)
    request.num_computed_tokens, request.status = len(PROMPT), RequestStatus.FINISHED_LENGTH_CAPPED
    return parent.request_finished_all_groups(request, BLOCKS)


def _matched(parent, request):
    while (answer := parent.get_num_new_matched_tokens(request, 0))[0] is None:
        pass
    return answer


def _own(metadata):
    return next(part for part in metadata.metadata if isinstance(part, StepMetadata))


def test_parameters_of_both_children_travel_together(make_parent):
    """No key of one is a key of the other (T22)."""
    delayed, params = _prefill(make_parent())
    assert delayed
    assert (params["offloaded"], params["remote_num_tokens"]) == (True, 300)


@pytest.mark.parametrize("order", [("KVFerryConnector", "Offloading"), ("Offloading", "KVFerryConnector")])
def test_a_request_that_this_child_is_chosen_for_is_loaded(make_parent, order):
    params = _prefill(make_parent(order=order))[1]
    consumer, request = make_parent(order=order), _request("d-1", params)
    consumer.on_new_request(request)
    assert _matched(consumer, request) == (300, True)
    if hasattr(consumer, "get_loaded_kv_cache_group_ids"):  # from vLLM 0.32 on
        assert consumer.get_loaded_kv_cache_group_ids(request) == (0,)
    consumer.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([7, 8, 9],)), 300)
    (order,) = _own(consumer.build_connector_meta(None)).loads
    assert order.local_blocks == [[7, 8, 9]]


def test_a_request_that_the_other_child_is_chosen_for_gives_the_grant_back(make_parent, monkeypatch):
    """The parent calls every child, and tells those that it did not choose of no tokens (T6)."""
    monkeypatch.setattr(Offloading, "tokens", 128)
    order = ("Offloading", "KVFerryConnector")
    producer, consumer = make_parent(order=order), make_parent(order=order)
    request = _request("d-1", _prefill(producer)[1])
    consumer.on_new_request(request)
    assert _matched(consumer, request) == (128, True)
    blocks = SimpleNamespace(get_block_ids=lambda: ([7],), new_empty=lambda: None)
    consumer.update_state_after_alloc(request, blocks, 128)
    assert _own(consumer.build_connector_meta(None)).loads == []
    released = []
    while not released:
        released = _own(producer.build_connector_meta(None)).released
    assert released == ["p-1"]


def test_the_other_childs_handshake_and_none_at_all_are_let_be(make_parent):
    """The parent hands the first child's metadata to all of them, or none (T20, T21)."""
    parent = make_parent(order=("Offloading", "KVFerryConnector"))
    parent.set_xfer_handshake_metadata_pp_aware({(0, 0): parent.get_handshake_metadata()})
    parent.set_xfer_handshake_metadata_pp_aware({})
    assert _prefill(parent)[0]


def test_requests_of_the_other_child_are_none_of_ours(make_parent):
    """The parent passes what any child has finished to all of them (T23)."""
    parent = make_parent()
    output = KVConnectorOutput(finished_sending={"theirs"}, finished_recving={"theirs"}, failed_recving={"theirs"})
    parent.update_connector_output(output)
    assert _prefill(parent)[0]


@pytest.mark.parametrize("other", ["OffloadingConnector", "NixlConnector", "ExampleConnector"])
def test_the_parent_finds_one_layout_for_all_children(make_parent, other):
    """It compares what children ask for by name, and refuses two names of one layout."""
    children = [{"kv_connector": name, "kv_role": "kv_both"} for name in ("KVFerryConnector", other)]
    transfer = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": children}
    )
    config = SimpleNamespace(
        kv_transfer_config=transfer,
        model_config=SimpleNamespace(use_mla=False),
        attention_config=SimpleNamespace(hisparse_config=None),
    )
    assert MultiConnector.get_required_kvcache_layout(config) == "LBHNC"


@pytest.mark.parametrize("kind", [OffloadingConnector, ExampleConnector])
def test_stages_beside_a_child_that_knows_none_are_refused_by_vllm(kind):
    """The parent hands our workers' descriptions to every child, and vLLM's default takes those of one stage only."""
    child = object.__new__(kind)
    child.set_xfer_handshake_metadata_pp_aware({(0, 0): Foreign()})
    with pytest.raises(ValueError, match=f"{kind.__name__} received pp_rank > 0"):
        child.set_xfer_handshake_metadata_pp_aware({(0, 0): Foreign(), (1, 0): Foreign()})


def test_statistics_are_rebuilt_by_the_class_name(make_parent):
    """The parent looks a child up under the name of its class."""
    stats = MultiConnector.build_kv_connector_stats({"KVFerryConnector": {"data": {"bytes_transferred": {"": [7]}}}})
    assert isinstance(stats["KVFerryConnector"], TransferStats)


def test_a_hybrid_manager_stays_on_beside_a_child_that_supports_it(make_parent):
    assert MultiConnector.all_children_support_hma(make_parent()._kv_transfer_config)
