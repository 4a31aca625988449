"""The scheduler half against vLLM's own request objects, with both sides' real side channels."""

import threading
import time
from types import SimpleNamespace

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from kvferry.errors import SideChannelError
from kvferry.protocol.messages import Ack, Held
from kvferry.sidechannel.client import Client
from kvferry.vllm import scheduler as module
from kvferry.vllm.scheduler import SchedulerHalf, identity_of
from kvferry.vllm.settings import Settings

PROMPT = list(range(300))
BLOCKS = ([3, 4, 5],)
DEADLINE_S = 10.0
PRODUCE = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None, "remote_block_ids": None}


def _make_config(role, pp=1):
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=pp, data_parallel_index=0),
        kv_transfer_config=SimpleNamespace(
            is_kv_producer=role in ("kv_producer", "kv_both"),
            is_kv_consumer=role in ("kv_consumer", "kv_both"),
            engine_id="engine",
        ),
    )


@pytest.fixture
def make_half(monkeypatch):
    monkeypatch.setattr(module, "get_ip", lambda: "127.0.0.1")
    halves = []

    def make(role="kv_both", pp=1, **settings):
        halves.append(SchedulerHalf(_make_config(role, pp), Settings(**settings)))
        return halves[-1]

    yield make
    for half in halves:
        half.shutdown()


def _make_request(name, params, prompt=PROMPT):
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params} if params else None)
    return Request(name, list(prompt), sampling, None)


def _finish(request, tokens=300, status=RequestStatus.FINISHED_LENGTH_CAPPED):
    request.num_computed_tokens, request.status = tokens, status
    return request


def _blocks(ids):
    return SimpleNamespace(get_block_ids=lambda: (list(ids),))


def _matched(half, request, local=0):
    """What the scheduler hears once the producer has answered."""
    deadline = time.monotonic() + DEADLINE_S
    while (answer := half.get_num_new_matched_tokens(request, local))[0] is None:
        assert time.monotonic() < deadline, "the claim was never answered"
    return answer


def _released(half, count=1):
    """Requests the producer's workers are told to free, once there are so many."""
    released, deadline = [], time.monotonic() + DEADLINE_S
    while len(released) < count:
        assert time.monotonic() < deadline, f"only {released} released"
        released += half.build_connector_meta().released
    return released


def _prefill(producer, name="p-1", prompt=PROMPT):
    request = _make_request(name, PRODUCE, prompt)
    producer.on_new_request(request)
    assert producer.get_num_new_matched_tokens(request, 0) == (0, False)
    return producer.request_finished(_finish(request, len(prompt)), BLOCKS)


def _acknowledge(order, reader):
    client, done, replies = Client("test"), threading.Event(), []
    try:
        client.send(
            order.address,
            Ack(order.incarnation, order.remote_request, order.claim, reader),
            DEADLINE_S,
            lambda reply: (replies.append(reply), done.set()),
        )
        assert done.wait(DEADLINE_S)
    finally:
        client.close()
    return replies[0]


def test_a_finished_prefill_stays_and_says_where_it_is(make_half):
    delay, params = _prefill(make_half("kv_producer"))
    assert delay is True
    assert (params["do_remote_prefill"], params["remote_request_id"], params["remote_num_tokens"]) == (True, "p-1", 300)


def test_a_decode_request_loads_what_its_prefill_left(make_half):
    producer, consumer = make_half("kv_producer"), make_half("kv_consumer", pp=2)
    _, params = _prefill(producer)
    request = _make_request("d-1", params)
    consumer.on_new_request(request)
    assert _matched(consumer, request, local=128) == (172, True)
    consumer.update_state_after_alloc(request, _blocks([7, 8, 9]), 172)
    (order,) = consumer.build_connector_meta().loads
    assert consumer.build_connector_meta().loads == []
    assert (order.remote_blocks, order.local_blocks) == ([[3, 4, 5]], [[7, 8, 9]])
    assert (order.first_token, order.last_token) == (128, 300)
    assert producer.build_connector_meta().released == []
    assert [_acknowledge(order, reader) for reader in ("pp0tp0", "pp1tp0")] == [Held(), Held()]
    assert _released(producer) == ["p-1"]


def test_a_loaded_request_does_not_load_again_after_preemption(make_half):
    producer, consumer = make_half("kv_producer"), make_half("kv_consumer")
    _, params = _prefill(producer)
    request = _make_request("d-1", params)
    consumer.on_new_request(request)
    _, _ = _matched(consumer, request), consumer.update_state_after_alloc(request, _blocks([7, 8, 9]), 300)
    consumer.update_connector_output({"d-1"})
    consumer.update_state_after_alloc(request, _blocks([7, 8, 9]), 0)
    assert consumer.get_num_new_matched_tokens(request, 0) == (0, False)
    assert len(consumer.build_connector_meta().loads) == 1


def test_a_router_that_appends_a_token_still_loads_the_prefix(make_half):
    producer, consumer = make_half("kv_producer"), make_half("kv_consumer")
    _, params = _prefill(producer)
    request = _make_request("d-1", params, [*PROMPT, 7])
    consumer.on_new_request(request)
    assert _matched(consumer, request) == (300, True)


@pytest.mark.parametrize("prompt", [PROMPT[::-1], PROMPT[:-1], [9, *PROMPT]], ids=["other", "shorter", "shifted"])
def test_parameters_used_with_another_prompt_load_nothing_and_free_the_blocks(make_half, prompt):
    producer, consumer = make_half("kv_producer"), make_half("kv_consumer")
    _, params = _prefill(producer)
    request = _make_request("d-1", params, prompt)
    consumer.on_new_request(request)
    assert consumer.get_num_new_matched_tokens(request, 0) == (0, False)
    assert _released(producer) == ["p-1"]


def test_a_request_aborted_before_it_was_scheduled_frees_the_producers_blocks(make_half):
    producer, consumer = make_half("kv_producer"), make_half("kv_consumer")
    _, params = _prefill(producer)
    request = _make_request("d-1", params)
    consumer.on_new_request(request)
    consumer.request_finished(_finish(request, 0, RequestStatus.FINISHED_ABORTED), ([],))
    assert _released(producer) == ["p-1"]


def test_a_prompt_found_locally_frees_the_producers_blocks(make_half):
    producer, consumer = make_half("kv_producer"), make_half("kv_consumer")
    _, params = _prefill(producer)
    request = _make_request("d-1", params)
    consumer.on_new_request(request)
    assert _matched(consumer, request, local=300) == (0, False)
    consumer.update_state_after_alloc(request, _blocks([7, 8, 9]), 0)
    assert _released(producer) == ["p-1"]


def test_a_request_aborted_while_it_loads_is_left_to_its_workers(make_half):
    producer, consumer = make_half("kv_producer"), make_half("kv_consumer")
    _, params = _prefill(producer)
    request = _make_request("d-1", params)
    consumer.on_new_request(request)
    _matched(consumer, request)
    consumer.update_state_after_alloc(request, _blocks([7, 8, 9]), 300)
    consumer.request_finished(_finish(request, 0, RequestStatus.FINISHED_ABORTED), ([7, 8, 9],))
    (order,) = consumer.build_connector_meta().loads
    assert producer.build_connector_meta().released == []
    assert _acknowledge(order, "pp0tp0") == Held()


def test_used_parameters_load_nothing_a_second_time(make_half):
    producer, consumer = make_half("kv_producer"), make_half("kv_consumer")
    _, params = _prefill(producer)
    for name, expected in (("d-1", (300, True)), ("d-2", (0, False))):
        request = _make_request(name, params)
        consumer.on_new_request(request)
        assert _matched(consumer, request) == expected
        if expected[1]:
            consumer.update_state_after_alloc(request, _blocks([7, 8, 9]), 300)
            _acknowledge(consumer.build_connector_meta().loads[0], "pp0tp0")


def test_an_unclaimed_prefill_is_freed_after_its_lease(make_half):
    producer = make_half("kv_producer", kv_lease_duration=0.05)
    _prefill(producer)
    assert _released(producer) == ["p-1"]


def test_a_lease_that_ran_out_is_counted_once(make_half):
    producer = make_half("kv_producer", kv_lease_duration=0.05)
    _prefill(producer)
    assert _released(producer) == ["p-1"]
    assert producer.take_stats().data["num_kv_expired_reqs"] == [1]
    assert producer.take_stats() is None


def test_five_hundred_claims_at_once_are_all_granted(make_half):
    producer = make_half("kv_producer")
    consumers = [make_half("kv_consumer") for _ in range(5)]
    requests = [_make_request(f"d-{i}", _prefill(producer, f"p-{i}")[1]) for i in range(500)]
    for i, request in enumerate(requests):
        consumers[i % 5].on_new_request(request)
    answers = [_matched(consumers[i % 5], request) for i, request in enumerate(requests)]
    assert answers == [(300, True)] * 500
    for i, request in enumerate(requests):
        consumers[i % 5].request_finished(_finish(request, 0, RequestStatus.FINISHED_ABORTED), ([],))
    assert sorted(_released(producer, 500)) == sorted(f"p-{i}" for i in range(500))


def test_a_claimed_prefill_outlives_its_lease_while_the_consumer_lives(make_half):
    producer, consumer = make_half("kv_producer", kv_lease_duration=0.3), make_half("kv_consumer")
    _, params = _prefill(producer)
    request = _make_request("d-1", params)
    consumer.on_new_request(request)
    _matched(consumer, request)
    threading.Event().wait(1.0)  # three leases: it is the passing of time that is tested
    assert producer.build_connector_meta().released == []
    consumer.shutdown()
    assert _released(producer) == ["p-1"]


@pytest.mark.parametrize(
    "status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR, RequestStatus.FINISHED_REPETITION]
)
def test_a_prefill_that_did_not_complete_hands_nothing_over(make_half, status):
    producer = make_half("kv_producer")
    request = _finish(_make_request("p-1", PRODUCE), status=status)
    assert producer.request_finished(request, BLOCKS) == (False, None)


def test_an_ordinary_request_is_none_of_the_connectors_business(make_half):
    half = make_half("kv_both")
    request = _make_request("r", None)
    half.on_new_request(request)
    assert half.get_num_new_matched_tokens(request, 0) == (0, False)
    half.update_state_after_alloc(request, _blocks([1]), 0)
    assert half.request_finished(_finish(request), BLOCKS) == (False, None)
    metadata = half.build_connector_meta()
    assert (metadata.loads, metadata.released) == ([], [])


@pytest.mark.parametrize("params", [{"do_remote_prefill": True}, {"do_remote_prefill": "yes"}, {"kvferry": {}}])
def test_parameters_that_mean_nothing_are_computed_locally(make_half, params):
    half = make_half("kv_consumer")
    request = _make_request("d-1", params)
    half.on_new_request(request)
    assert half.get_num_new_matched_tokens(request, 0) == (0, False)


def test_a_producer_that_never_answers_costs_the_claim_timeout(make_half):
    producer, consumer = make_half("kv_producer"), make_half("kv_consumer", claim_timeout=0.2)
    _, params = _prefill(producer)
    request = _make_request("d-1", {**params, "remote_port": 9})
    consumer.on_new_request(request)
    assert _matched(consumer, request) == (0, False)


def test_roles_decide_what_is_opened(make_half):
    """A consumer listens nowhere; a producer claims nothing."""
    producer, consumer = make_half("kv_producer"), make_half("kv_consumer")
    assert consumer.request_finished(_finish(_make_request("p", PRODUCE)), BLOCKS) == (False, None)
    request = _make_request("d", _prefill(producer)[1])
    producer.on_new_request(request)
    assert producer.get_num_new_matched_tokens(request, 0) == (0, False)


def test_a_configured_port_that_is_taken_stops_the_start(make_half):
    port = _prefill(make_half("kv_producer"))[1]["remote_port"]
    with pytest.raises(SideChannelError, match=str(port)):
        make_half("kv_producer", side_channel_port=port)


def test_an_adapter_is_part_of_a_prompts_identity():
    plain, adapted = _make_request("a", None), _make_request("b", None)
    adapted.lora_request = SimpleNamespace(lora_name="tuned")
    assert identity_of(plain, 300) != identity_of(adapted, 300)
