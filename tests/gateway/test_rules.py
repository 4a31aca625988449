"""The rules of docs/gateway.md for the two legs of a request, each held by the test named after it."""

import asyncio
import json
import time

import pytest

from kvferry.gateway.app import KEEP_ALIVE_S
from kvferry.gateway.dispatch import RetryBudget

from .stage import BODIES, DEADLINE_S, REQUEST_ID, body_of, run, stage
from .standin import LONG

TEXT, CHAT, RESPONSES = BODIES
BOTH_WAYS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
EVERYWHERE = pytest.mark.parametrize("path", BODIES)


@EVERYWHERE
@BOTH_WAYS
@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_an_engines_error_reaches_the_client_as_it_is(path, stream, leg):
    async def scenario():
        async with stage(plain_decode=False) as s:
            for fault, retry_after in (("400", None), ("503", "7"), ("500", None)):
                engine = getattr(s, leg)[0]
                engine.faults.extend([fault] * 2)
                answer = await s.post(path, body_of(path, stream))
                assert answer.status == int(fault)
                assert answer.json["error"]["message"] == f"told to answer {fault}"
                assert answer.headers.get("retry-after") == retry_after
                await s.settled(lambda: s.grants == 0)
                engine.faults.clear()

    run(scenario())


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_a_long_error_reaches_the_client_whole(leg):
    async def scenario():
        async with stage() as s:
            getattr(s, leg)[0].faults.append("long 400")
            answer = await s.post(TEXT, body_of())
            assert (answer.status, answer.json["error"]["message"]) == (400, f"told to answer 400{LONG}")

    run(scenario())


@EVERYWHERE
@pytest.mark.parametrize("fault", ["error first", "close after head"])
def test_no_200_is_committed_before_decodes_first_event_is_read(path, fault):
    async def scenario():
        async with stage() as s:
            s.decode[0].faults.extend([fault] * 2)
            answer = await s.post(path, body_of(path, stream=True))
            assert answer.status == (500 if fault == "error first" else 502)
            assert "error" in answer.json
            await s.settled(lambda: s.grants == 0)

    run(scenario())


@EVERYWHERE
def test_after_the_first_byte_an_error_is_an_event_and_a_closed_stream(path):
    async def scenario():
        async with stage(decode=2) as s:
            for engine in s.decode:
                engine.faults.append("half")
            answer = await s.post(path, body_of(path, stream=True))
            assert (answer.status, answer.broken) == (200, False)
            last = answer.events[-1]
            assert last.get("type") == "error" if path == RESPONSES else last["error"]["code"] == 502
            assert len(answer.events) > 1
            # And nothing was tried again.
            assert sum(len(engine.seen) for engine in s.decode) == 1

    run(scenario())


def test_a_stream_that_falls_silent_ends_with_an_error():
    async def scenario():
        async with stage(idle_timeout=0.2) as s:
            s.decode[0].faults.append("hang between")
            answer = await s.post(TEXT, body_of(stream=True))
            assert "error" in answer.events[-1]
            await s.decode[0].gone.wait()

    run(scenario())


def test_several_prompts_are_split_into_single_prefills():
    async def scenario():
        async with stage() as s:
            assert (await s.post(TEXT, body_of(prompt=["one", "two", "three"]))).status == 200
            assert sorted(leg.body["prompt"] for leg in s.prefill[0].seen) == ["one", "three", "two"]
            assert s.decode[0].fetched == 3

    run(scenario())


def test_several_answers_to_one_prompt_share_one_grant():
    async def scenario():
        async with stage() as s:
            assert len((await s.post(CHAT, body_of(CHAT, n=3))).json["choices"]) == 3
            assert (s.prefill[0].seen[0].body["n"], s.decode[0].seen[0].body["n"]) == (1, 3)

    run(scenario())


def test_when_one_of_several_prompts_is_refused_so_is_the_request():
    async def scenario():
        async with stage() as s:
            s.prefill[0].faults.extend([None, "400", None])
            answer = await s.post(TEXT, body_of(prompt=["one", "two", "three"], stream=True))
            assert answer.status == 400
            await s.settled(
                lambda: (
                    s.grants == 0
                    and sum(rank.requests for rank in s.gateway.fleet.instances[s.decode[0].url].ranks) == 0
                )
            )

    run(scenario())


@BOTH_WAYS
@pytest.mark.parametrize("fault", ["500", "503", "close", "close after head", "half", "junk"])
def test_when_prefill_fails_another_prefill_is_asked(stream, fault):
    async def scenario():
        async with stage(prefill=2) as s:
            for engine in s.prefill:
                engine.faults.append(fault)
            # Whichever is asked first fails, and the other then has a failure waiting that is taken back.
            first = asyncio.ensure_future(s.post(TEXT, body_of(stream=stream)))
            await s.settled(lambda: any(len(engine.seen) for engine in s.prefill))
            for engine in s.prefill:
                if not engine.seen:
                    engine.faults.clear()
            assert (await first).status == 200
            assert s.decode[0].fetched == 1
            assert sorted(len(engine.seen) for engine in s.prefill) == [1, 1]

    run(scenario())


@BOTH_WAYS
def test_when_no_prefill_can_decode_prefills_and_says_so(stream):
    async def scenario():
        async with stage() as s:
            await s.prefill[0].shut()
            answer = await s.post(TEXT, body_of(stream=stream))
            assert answer.status == 200
            assert s.decode[0].fetched == 0
            metrics = (await s.get("/metrics")).body
            assert b'kvferry_gateway_plain_decodes_total{reason="prefill_failed"} 1.0' in metrics

    run(scenario())


def test_decode_prefills_only_where_that_is_allowed():
    async def scenario():
        async with stage(plain_decode=False) as s:
            await s.prefill[0].shut()
            answer = await s.post(TEXT, body_of())
            assert answer.status in (502, 503)
            assert not s.decode[0].seen

    run(scenario())


def test_a_prefill_that_sheds_load_is_obeyed():
    async def scenario():
        async with stage() as s:
            s.prefill[0].faults.append("429")
            answer = await s.post(TEXT, body_of())
            assert (answer.status, answer.headers["retry-after"]) == (429, "7")
            assert not s.decode[0].seen

    run(scenario())


@BOTH_WAYS
@pytest.mark.parametrize("fault", ["500", "503", "close"])
def test_when_decode_fails_before_its_first_byte_another_gets_a_new_prefill(stream, fault):
    async def scenario():
        async with stage(decode=2) as s:
            s.decode[0].faults.append(fault)
            s.decode[1].faults.append(fault)
            asked = asyncio.ensure_future(s.post(TEXT, body_of(stream=stream)))
            await s.settled(lambda: any(len(engine.seen) for engine in s.decode))
            for engine in s.decode:
                if not engine.seen:
                    engine.faults.clear()
            assert (await asked).status == 200
            nonces = [leg.body["kv_transfer_params"]["kvferry"]["nonce"] for engine in s.decode for leg in engine.seen]
            assert len(set(nonces)) == 2
            assert len(s.prefill[0].seen) == 2
            await s.settled(lambda: s.grants == 0)

    run(scenario())


def test_attempts_are_bounded():
    async def scenario():
        async with stage(prefill=3, decode=3, attempts=2) as s:
            for engine in s.decode:
                engine.faults.extend(["500"] * 9)
            assert (await s.post(TEXT, body_of())).status == 500
            assert sum(len(engine.seen) for engine in s.decode) == 2

    run(scenario())


def test_a_request_that_fails_everywhere_meets_two_of_each():
    """The retry of one leg does not begin the count of the other anew."""

    async def scenario():
        async with stage(prefill=3, decode=3, attempts=2) as s:
            for engine in (*s.prefill, *s.decode):
                engine.faults.extend(["500"] * 9)
            assert (await s.post(TEXT, body_of())).status == 500
            for side in (s.prefill, s.decode):
                assert sum(len(engine.seen) for engine in side) == 2

    run(scenario())


def test_retries_have_a_budget():
    budget = RetryBudget(ratio=0.2, burst=2)
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    for _ in range(4):
        budget.earn()
    assert not budget.spend()
    budget.earn()
    assert budget.spend()


def test_a_failing_fleet_is_not_flooded_with_retries():
    async def scenario():
        async with stage(retry_ratio=0.0, plain_decode=False) as s:
            s.prefill[0].faults.extend(["500"] * 100)
            for _ in range(30):
                assert (await s.post(TEXT, body_of())).status == 500
            assert len(s.prefill[0].seen) == 40

    run(scenario())


@EVERYWHERE
@BOTH_WAYS
@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_a_request_never_waits_longer_than_its_deadline(path, stream, leg):
    async def scenario():
        async with stage(deadline=0.3) as s:
            getattr(s, leg)[0].faults.append("hang")
            started = time.monotonic()
            answer = await s.post(path, body_of(path, stream=stream))
            assert (answer.status, answer.json["error"]["type"]) == (504, "GatewayTimeoutError")
            assert time.monotonic() - started < DEADLINE_S / 2
            await getattr(s, leg)[0].gone.wait()
            await s.settled(lambda: s.grants == 0)

    run(scenario())


def test_a_prefill_that_hangs_is_replaced():
    async def scenario():
        async with stage(prefill=2, prefill_timeout=0.2) as s:
            for engine in s.prefill:
                engine.faults.append("hang")
            asked = asyncio.ensure_future(s.post(TEXT, body_of()))
            await s.settled(lambda: any(engine.hanging.is_set() for engine in s.prefill))
            for engine in s.prefill:
                if not engine.seen:
                    engine.faults.clear()
            assert (await asked).status == 200
            assert s.decode[0].fetched == 1

    run(scenario())


def test_a_silent_decode_is_not_taken_for_a_prefill_that_holds_nothing():
    """A prefill answer without parameters makes decode compute the prompt again, and that is counted."""

    async def scenario():
        async with stage() as s:
            s.prefill[0].faults.append("no parameters")
            assert (await s.post(TEXT, body_of())).status == 200
            assert "kv_transfer_params" not in s.decode[0].seen[0].body
            assert b'plain_decodes_total{reason="no_parameters"} 1.0' in (await s.get("/metrics")).body

    run(scenario())


def test_a_fault_of_the_gateway_itself_is_a_500_and_counted():
    class Faulty:
        async def open(self, legs, job):
            raise RuntimeError

    async def scenario():
        async with stage(strategy=Faulty()) as s:
            answer = await s.post(TEXT, body_of())
            assert (answer.status, answer.json["error"]["message"]) == (500, "the gateway failed")
            assert answer.headers["x-request-id"] == REQUEST_ID
            assert f'requests_total{{path="{TEXT}",status="500"}} 1.0'.encode() in (await s.get("/metrics")).body

    run(scenario())


def test_another_strategy_can_take_the_place_of_prefill_first():
    """The seam for transfers that stream: everything but the order of the legs stays."""

    class DecodeOnly:
        async def open(self, legs, job):
            return await legs.decode(job, None)

    async def scenario():
        async with stage(strategy=DecodeOnly()) as s:
            assert (await s.post(CHAT, json.loads(json.dumps(body_of(CHAT))))).status == 200
            assert not s.prefill[0].seen

    run(scenario())


def test_with_streaming_decode_is_asked_while_prefill_computes():
    async def scenario():
        async with stage(streaming=True) as s:
            s.prefill[0].gate = asyncio.Event()
            asked = asyncio.ensure_future(s.post(TEXT, body_of()))
            await s.settled(lambda: s.prefill[0].seen and s.decode[0].seen)
            s.prefill[0].gate.set()
            assert (await asked).status == 200
            assert s.decode[0].fetched == 1
            assert b"plain_decodes_total{" not in (await s.get("/metrics")).body

    run(scenario())


STREAMED = body_of(TEXT, stream=True, stream_options={"include_usage": True})


def test_with_streaming_the_first_byte_does_not_wait_for_prefills_answer_but_the_usage_does():
    async def scenario():
        async with stage(streaming=True) as s:
            s.prefill[0].late = asyncio.Event()
            async with s.client.post(s.url + TEXT, json=STREAMED) as answer:
                first = await answer.content.readany()
                assert b'"text"' in first
                s.prefill[0].late.set()
                rest = await answer.content.read()
            own = len(json.dumps(STREAMED["prompt"])) // 4 // 2
            assert f'"cached_tokens":{own}'.encode() in (first + rest).replace(b" ", b"")
            assert s.decode[0].fetched == 1
            assert b"plain_decodes_total{" not in (await s.get("/metrics")).body

    run(scenario())


def test_with_streaming_an_answer_does_not_wait_for_a_prefill_that_nobody_needs():
    async def computed_here(_):
        return False

    async def scenario():
        async with stage(streaming=True) as s:
            s.prefill[0].gate, s.decode[0]._fetch = asyncio.Event(), computed_here
            answer = await s.post(TEXT, STREAMED)
            assert (answer.status, answer.events[-1]) == (200, "[DONE]")
            assert s.decode[0].fetched == 0
            await s.settled(lambda: s.prefill[0].left == 1)
            assert b'plain_decodes_total{reason="prefill_late"} 1.0' in (await s.get("/metrics")).body
            await s.settled(lambda: s.grants == 0)

    run(scenario())


def test_with_streaming_a_client_that_leaves_ends_a_prefill_that_has_not_answered():
    async def scenario():
        async with stage(streaming=True) as s:
            s.prefill[0].late = asyncio.Event()
            s.decode[0].faults.append("hang between")
            async with s.client.post(s.url + TEXT, json=STREAMED) as answer:
                await answer.content.readany()
            await s.settled(lambda: s.prefill[0].left == 1 and s.decode[0].left == 1)

    run(scenario())


def test_with_streaming_a_prefill_that_was_restarted_unnoticed_is_survived_and_counted():
    """Decode looks for the transfer at an incarnation that is gone; what the new one holds is nobody's."""

    async def scenario():
        async with stage(streaming=True, probe_interval=60.0) as s:
            await s.prefill[0].restart()
            answer = await s.post(TEXT, body_of())
            assert (answer.status, s.decode[0].fetched) == (200, 0)
            own = len(json.dumps(body_of()["prompt"])) // 4 // 2
            assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == own
            assert b'plain_decodes_total{reason="restarted"} 1.0' in (await s.get("/metrics")).body
            await s.settled(lambda: s.grants == 0)

    run(scenario())


def test_with_streaming_what_a_restarted_prefill_holds_is_released_although_its_answer_is_not_waited_for():
    async def scenario():
        async with stage(streaming=True, probe_interval=60.0) as s:
            await s.prefill[0].restart()
            s.prefill[0].late = asyncio.Event()
            answer = await s.post(TEXT, body_of())
            assert (answer.status, s.decode[0].fetched) == (200, 0)
            await s.settled(lambda: s.prefill[0].left == 1 and s.grants == 0)

    run(scenario())


def test_a_connection_to_an_engine_is_not_kept_until_the_engine_closes_it():
    from vllm import envs  # whose servers close it after so long

    assert 2 * KEEP_ALIVE_S < envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE
