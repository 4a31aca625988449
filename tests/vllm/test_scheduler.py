"""The scheduler half against vLLM's own request objects, with both sides' real side channels."""

import socket
import threading
import time
from types import SimpleNamespace

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from kvferry.errors import SideChannelError
from kvferry.protocol.messages import Ack, Held, Offer
from kvferry.sidechannel.client import Client
from kvferry.vllm import scheduler as module
from kvferry.vllm.metrics import TransferStats
from kvferry.vllm.scheduler import SchedulerHalf
from kvferry.vllm.settings import Settings

PROMPT = list(range(300))
BLOCKS = ([3, 4, 5],)
DEADLINE_S = 10.0
PRODUCE = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None, "remote_block_ids": None}


def _make_config(role, pp, policy, pcp=1):
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=pp,
            prefill_context_parallel_size=pcp,
            data_parallel_index=0,
        ),
        kv_transfer_config=SimpleNamespace(
            is_kv_producer=role in ("kv_producer", "kv_both"),
            is_kv_consumer=role in ("kv_consumer", "kv_both"),
            engine_id="engine",
            kv_load_failure_policy=policy,
        ),
    )


@pytest.fixture
def make_half(monkeypatch):
    monkeypatch.setattr(module, "get_ip", lambda: "127.0.0.1")
    halves = []

    def make(role="kv_both", pp=1, policy="recompute", pcp=1, **settings):
        halves.append(SchedulerHalf(_make_config(role, pp, policy, pcp), Settings(**settings)))
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
        released += half.build_connector_meta(None).released
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
    (order,) = consumer.build_connector_meta(None).loads
    assert consumer.build_connector_meta(None).loads == []
    assert (order.grant.blocks, order.local_blocks) == ([[3, 4, 5]], [[7, 8, 9]])
    assert (order.first_token, order.last_token) == (128, 300)
    assert producer.build_connector_meta(None).released == []
    assert [_acknowledge(order, reader) for reader in ("pp0tp0", "pp1tp0")] == [Held(), Held()]
    assert _released(producer) == ["p-1"]


def test_every_rank_of_prefill_context_parallelism_is_waited_for(make_half):
    producer, consumer = make_half("kv_producer"), make_half("kv_consumer", pcp=2)
    _, params = _prefill(producer)
    request = _make_request("d-1", params)
    consumer.on_new_request(request)
    _, _ = _matched(consumer, request), consumer.update_state_after_alloc(request, _blocks([7, 8, 9]), 300)
    (order,) = consumer.build_connector_meta(None).loads
    assert _acknowledge(order, "pp0tp0") == Held()
    assert producer.build_connector_meta(None).released == []
    assert _acknowledge(order, "pp0tp1") == Held()
    assert _released(producer) == ["p-1"]


def test_a_loaded_request_does_not_load_again_after_preemption(make_half):
    producer, consumer = make_half("kv_producer"), make_half("kv_consumer")
    _, params = _prefill(producer)
    request = _make_request("d-1", params)
    consumer.on_new_request(request)
    _, _ = _matched(consumer, request), consumer.update_state_after_alloc(request, _blocks([7, 8, 9]), 300)
    consumer.update_connector_output({"d-1"}, set())
    consumer.update_state_after_alloc(request, _blocks([7, 8, 9]), 0)
    assert consumer.get_num_new_matched_tokens(request, 0) == (0, False)
    assert len(consumer.build_connector_meta(None).loads) == 1


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
    assert _matched(consumer, request) == (0, False)
    assert _released(producer) == ["p-1"]


@pytest.fixture
def slow_reading(monkeypatch):
    """Offers are read once the second event is set; the first is set when one begins to be."""
    reading, go_on, read = threading.Event(), threading.Event(), Offer.from_params

    def slowly(*args):
        reading.set()
        assert go_on.wait(DEADLINE_S)
        return read(*args)

    monkeypatch.setattr(Offer, "from_params", slowly)
    return reading, go_on


def test_offers_are_read_while_the_engines_thread_goes_on(make_half, slow_reading):
    producer, consumer = make_half("kv_producer"), make_half("kv_consumer")
    request, (reading, go_on) = _make_request("d-1", _prefill(producer)[1]), slow_reading
    consumer.on_new_request(request)
    assert reading.wait(DEADLINE_S)
    assert consumer.get_num_new_matched_tokens(request, 0) == (None, False)
    go_on.set()
    assert _matched(consumer, request) == (300, True)


def test_a_request_aborted_before_its_offer_was_read_frees_the_producers_blocks(make_half, slow_reading):
    producer, consumer = make_half("kv_producer"), make_half("kv_consumer")
    request, (reading, go_on) = _make_request("d-1", _prefill(producer)[1]), slow_reading
    consumer.on_new_request(request)
    assert reading.wait(DEADLINE_S)
    consumer.request_finished(_finish(request, 0, RequestStatus.FINISHED_ABORTED), ([],))
    go_on.set()
    assert _released(producer) == ["p-1"]
    assert _matched(consumer, request) == (0, False)


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[::-1]], ids=["right", "wrong"])
def test_a_request_whose_offer_is_read_too_late_is_counted_once_and_frees_the_producers_blocks(
    make_half, slow_reading, prompt
):
    producer, consumer = make_half("kv_producer"), make_half("kv_consumer", claim_timeout=0.1)
    request, (_, go_on) = _make_request("d-1", _prefill(producer)[1], prompt), slow_reading
    consumer.on_new_request(request)
    assert _matched(consumer, request) == (0, False)
    consumer.update_state_after_alloc(request, _blocks([7, 8, 9]), 0)
    go_on.set()
    assert _released(producer) == ["p-1"]
    assert _stats(consumer, "recomputed") == {"late": 1}


def test_a_request_whose_offer_cannot_be_read_is_computed_here_at_once(make_half, monkeypatch, caplog):
    consumer = make_half("kv_consumer", claim_timeout=1000.0)
    monkeypatch.setattr(Offer, "from_params", lambda *_: 1 // 0)
    request = _make_request("d-1", {"do_remote_prefill": True, "kvferry": {}})
    consumer.on_new_request(request)
    assert _matched(consumer, request) == (0, False)
    assert _stats(consumer, "recomputed") == {"parameters": 1}
    assert "parameters of request d-1 (at tp1pp1dp0) could not be read" in caplog.text


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
    (order,) = consumer.build_connector_meta(None).loads
    assert producer.build_connector_meta(None).released == []
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
            _acknowledge(consumer.build_connector_meta(None).loads[0], "pp0tp0")


def test_an_unclaimed_prefill_is_freed_after_its_lease(make_half):
    producer = make_half("kv_producer", kv_lease_duration=0.05)
    _prefill(producer)
    assert _released(producer) == ["p-1"]


def test_a_lease_that_ran_out_is_counted_once(make_half):
    producer = make_half("kv_producer", kv_lease_duration=0.05)
    _prefill(producer)
    assert _released(producer) == ["p-1"]
    assert producer.take_stats().data["num_kv_expired_reqs"] == {"": 1}
    assert producer.take_stats() is None


def _stats(half, key):
    """What was observed of a metric since the last call; other observations are dropped."""
    stats = half.take_stats()
    return stats.data.get(key, {}) if stats else {}


def test_a_load_is_observed_on_both_sides(make_half):
    producer, consumer = make_half("kv_producer"), make_half("kv_consumer")
    _, params = _prefill(producer)
    assert producer.take_stats().data == {"held_blocks": {"": 3}}
    request = _make_request("d-1", params)
    consumer.on_new_request(request)
    _matched(consumer, request)
    consumer.update_state_after_alloc(request, _blocks([7, 8, 9]), 300)
    _acknowledge(consumer.build_connector_meta(None).loads[0], "pp0tp0")
    consumer.update_connector_output({"d-1"}, set())
    claimed, ended = consumer.take_stats().data, producer.take_stats().data
    assert claimed["claims"] == {"granted": 1}
    assert 0 < claimed["phase"]["claim"][0] < DEADLINE_S
    assert "recomputed" not in claimed
    assert ended["held_blocks"] == {"": 0}
    assert 20 < ended["lease_left"][""][0] <= 30


def _claim_gone(make_half):
    producer, consumer = make_half("kv_producer", kv_lease_duration=0.05), make_half("kv_consumer")
    params = _prefill(producer)[1]
    _released(producer)
    return consumer, params, producer


def _claim_unreachable(make_half):
    producer, consumer = make_half("kv_producer"), make_half("kv_consumer")
    return consumer, {**_prefill(producer)[1], "remote_port": 9}, producer


def _claim_late(make_half):
    producer, consumer = make_half("kv_producer"), make_half("kv_consumer", claim_timeout=0.2)
    params = _prefill(producer)[1]
    mute = socket.create_server(("127.0.0.1", 0))
    return consumer, {**params, "remote_port": mute.getsockname()[1]}, mute


@pytest.mark.parametrize(
    ("outcome", "stage"), [("gone", _claim_gone), ("unreachable", _claim_unreachable), ("late", _claim_late)]
)
def test_a_claim_that_fails_is_counted_once_as_a_claim_and_as_a_prefill_here(make_half, caplog, outcome, stage):
    consumer, params, other = stage(make_half)
    request = _make_request("d-1", params)
    consumer.on_new_request(request)
    assert _matched(consumer, request) == (0, False)
    consumer.update_state_after_alloc(request, _blocks([7, 8, 9]), 0)
    seen, deadline = TransferStats(), time.monotonic() + DEADLINE_S
    while "claims" not in seen.data:  # a late one is given up before its answer is
        assert time.monotonic() < deadline
        seen.aggregate(consumer.take_stats() or TransferStats())
    assert seen.data["claims"] == {outcome: 1}
    assert seen.data["recomputed"] == {outcome: 1}
    assert "phase" not in seen.data
    if outcome == "gone":
        assert _stats(other, "gone") == {"claim": 1}
    if outcome == "late":
        other.close()


@pytest.mark.parametrize(
    ("reason", "prompt", "change"), [("parameters", PROMPT, {"remote_port": 0}), ("prompt", PROMPT[::-1], {})]
)
def test_an_offer_that_is_not_believed_is_counted_and_logged_with_its_request(
    make_half, caplog, reason, prompt, change
):
    producer, consumer = make_half("kv_producer"), make_half("kv_consumer", pp=2)
    _, params = _prefill(producer)
    request = _make_request("d-1", {**params, **change}, prompt)
    with caplog.at_level("INFO", logger="kvferry"):
        consumer.on_new_request(request)
        assert _matched(consumer, request) == (0, False)
    assert _stats(consumer, "recomputed") == {reason: 1}
    incarnation = params["kvferry"]["incarnation"][:8]
    at = f"from {incarnation} tp1pp1dp0 at 127.0.0.1:{params['remote_port']} to tp1pp2dp0"
    assert f"request d-1 ({'at tp1pp2dp0' if change else at})" in caplog.text


def test_a_grant_that_is_lost_while_its_request_waits_for_blocks_is_counted(make_half):
    producer, consumer = make_half("kv_producer"), make_half("kv_consumer", hold_timeout=0.1)
    request = _make_request("d-1", _prefill(producer)[1])
    consumer.on_new_request(request)
    assert _matched(consumer, request) == (300, True)
    assert _released(producer) == ["p-1"]
    assert _matched(consumer, request) == (0, False)
    consumer.update_state_after_alloc(request, _blocks([7, 8, 9]), 0)
    assert _stats(consumer, "recomputed") == {"lost": 1}


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_load_that_failed_is_computed_here_only_if_the_policy_says_so(make_half, policy):
    producer, consumer = make_half("kv_producer"), make_half("kv_consumer", policy=policy)
    request = _make_request("d-1", _prefill(producer)[1])
    consumer.on_new_request(request)
    _matched(consumer, request)
    consumer.update_state_after_alloc(request, _blocks([7, 8, 9]), 300)
    consumer.update_connector_output({"d-1", "of another connector"}, {"d-1", "of another connector"})
    assert _stats(consumer, "recomputed") == ({"failed": 1} if policy == "recompute" else {})


@pytest.mark.parametrize("how", ["found locally", "aborted", "not looked at"])
def test_a_load_that_nobody_needs_is_not_computed_instead(make_half, how):
    """The last is a request for log probabilities of its prompt: vLLM takes nothing from a cache, nor asks."""
    producer, consumer = make_half("kv_producer"), make_half("kv_consumer")
    request = _make_request("d-1", _prefill(producer)[1])
    consumer.on_new_request(request)
    if how == "found locally":
        _matched(consumer, request, local=300)
    if how == "aborted":
        consumer.request_finished(_finish(request, 0, RequestStatus.FINISHED_ABORTED), ([],))
    else:
        consumer.update_state_after_alloc(request, _blocks([7, 8, 9]), 0)
    assert _released(producer) == ["p-1"]
    assert _stats(consumer, "recomputed") == {}


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
    assert producer.build_connector_meta(None).released == []
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
    metadata = half.build_connector_meta(None)
    assert (metadata.loads, metadata.released) == ([], [])


@pytest.mark.parametrize("params", [{"do_remote_prefill": True}, {"do_remote_prefill": "yes"}, {"kvferry": {}}])
def test_parameters_that_mean_nothing_are_computed_locally(make_half, params):
    half = make_half("kv_consumer", claim_timeout=1000.0)
    request = _make_request("d-1", params)
    half.on_new_request(request)
    assert _matched(half, request) == (0, False)


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


def test_the_workers_are_told_once_of_a_producer_that_is_new(make_half):
    producer, consumer = make_half("kv_producer"), make_half("kv_consumer")
    sighted = []
    for number in range(2):
        _, params = _prefill(producer, f"p-{number}", list(range(number, 300 + number)))
        request = _make_request(f"d-{number}", params, list(range(number, 300 + number)))
        consumer.on_new_request(request)
        assert _matched(consumer, request) == (300, True)
        sighted += consumer.build_connector_meta(None).sighted
    assert sighted == [(producer._producer.address, params["kvferry"]["incarnation"])]
