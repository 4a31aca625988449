"""The rules of docs/gateway.md, each held by the test named after it."""

import asyncio
import json
import logging
import time

import pytest

from kvferry.gateway.dispatch import RetryBudget

from .stage import BODIES, DEADLINE_S, REQUEST_ID, run, stage
from .standin import LONG

TEXT, CHAT, RESPONSES = BODIES
BOTH_WAYS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
EVERYWHERE = pytest.mark.parametrize("path", BODIES)


def _body(path=TEXT, stream=False, **changes):
    return {**BODIES[path], **({"stream": True} if stream else {}), **changes}


@EVERYWHERE
@BOTH_WAYS
@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_an_engines_error_reaches_the_client_as_it_is(path, stream, leg):
    async def scenario():
        async with stage(plain_decode=False) as s:
            for fault, retry_after in (("400", None), ("503", "7"), ("500", None)):
                engine = getattr(s, leg)[0]
                engine.faults.extend([fault] * 2)
                answer = await s.post(path, _body(path, stream))
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
            answer = await s.post(TEXT, _body())
            assert (answer.status, answer.json["error"]["message"]) == (400, f"told to answer 400{LONG}")

    run(scenario())


@EVERYWHERE
@pytest.mark.parametrize("fault", ["error first", "close after head"])
def test_no_200_is_committed_before_decodes_first_event_is_read(path, fault):
    async def scenario():
        async with stage() as s:
            s.decode[0].faults.extend([fault] * 2)
            answer = await s.post(path, _body(path, stream=True))
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
            answer = await s.post(path, _body(path, stream=True))
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
            answer = await s.post(TEXT, _body(stream=True))
            assert "error" in answer.events[-1]
            await s.decode[0].gone.wait()

    run(scenario())


@EVERYWHERE
def test_client_sent_transfer_parameters_and_internal_headers_reach_no_engine(path):
    async def scenario():
        async with stage() as s:
            poison = {"kv_transfer_params": {"remote_host": "evil"}, "ec_transfer_params": {"x": 1}}
            headers = {"X-data-parallel-rank": "7", "X-Internal": "1", "Cookie": "a=b", "X-Forwarded-For": "1.2.3.4"}
            assert (await s.post(path, {**_body(path), **poison}, **headers)).status == 200
            assert (await s.post(path, {**_body(path), **poison, "use_beam_search": True}, **headers)).status == 200
            for leg in (*s.prefill[0].seen, *s.decode[0].seen):
                assert b"evil" not in leg.raw
                assert "ec_transfer_params" not in leg.body
                assert not {"x-data-parallel-rank", "x-internal", "cookie", "x-forwarded-for"} & leg.headers.keys()

    run(scenario())


def test_several_prompts_are_split_into_single_prefills():
    async def scenario():
        async with stage() as s:
            assert (await s.post(TEXT, _body(prompt=["one", "two", "three"]))).status == 200
            assert sorted(leg.body["prompt"] for leg in s.prefill[0].seen) == ["one", "three", "two"]
            assert s.decode[0].fetched == 3

    run(scenario())


def test_several_answers_to_one_prompt_share_one_grant():
    async def scenario():
        async with stage() as s:
            assert len((await s.post(CHAT, _body(CHAT, n=3))).json["choices"]) == 3
            assert (s.prefill[0].seen[0].body["n"], s.decode[0].seen[0].body["n"]) == (1, 3)

    run(scenario())


def test_when_one_of_several_prompts_is_refused_so_is_the_request():
    async def scenario():
        async with stage() as s:
            s.prefill[0].faults.extend([None, "400", None])
            answer = await s.post(TEXT, _body(prompt=["one", "two", "three"], stream=True))
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
            first = asyncio.ensure_future(s.post(TEXT, _body(stream=stream)))
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
            answer = await s.post(TEXT, _body(stream=stream))
            assert answer.status == 200
            assert s.decode[0].fetched == 0
            metrics = (await s.get("/metrics")).body
            assert b'kvferry_gateway_plain_decodes_total{reason="prefill_failed"} 1.0' in metrics

    run(scenario())


def test_decode_prefills_only_where_that_is_allowed():
    async def scenario():
        async with stage(plain_decode=False) as s:
            await s.prefill[0].shut()
            answer = await s.post(TEXT, _body())
            assert answer.status in (502, 503)
            assert not s.decode[0].seen

    run(scenario())


def test_a_prefill_that_sheds_load_is_obeyed():
    async def scenario():
        async with stage() as s:
            s.prefill[0].faults.append("429")
            answer = await s.post(TEXT, _body())
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
            asked = asyncio.ensure_future(s.post(TEXT, _body(stream=stream)))
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
            assert (await s.post(TEXT, _body())).status == 500
            assert sum(len(engine.seen) for engine in s.decode) == 2

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
                assert (await s.post(TEXT, _body())).status == 500
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
            answer = await s.post(path, _body(path, stream=stream))
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
            asked = asyncio.ensure_future(s.post(TEXT, _body()))
            await s.settled(lambda: any(engine.hanging.is_set() for engine in s.prefill))
            for engine in s.prefill:
                if not engine.seen:
                    engine.faults.clear()
            assert (await asked).status == 200
            assert s.decode[0].fetched == 1

    run(scenario())


def test_a_drained_instance_gets_nothing_new_and_finishes_what_it_has(tmp_path):
    async def scenario():
        async with stage(decode=2, admin_key_file=_key(tmp_path)) as s:
            drained, other = s.decode
            drained.gate = other.gate = asyncio.Event()
            under_way = [asyncio.ensure_future(s.post(TEXT, _body(prompt=f"{n}"))) for n in range(4)]
            await s.settled(lambda: len(drained.seen) + len(other.seen) == 4)
            before = len(drained.seen)
            assert before
            listed = await s.post("/admin/drain", {"url": drained.url}, Authorization="Bearer admin")
            assert [one["draining"] for one in listed.json if one["url"] == drained.url] == [True]
            drained.gate.set()
            assert [answer.status for answer in await asyncio.gather(*under_way)] == [200] * 4
            for number in range(6):
                assert (await s.post(TEXT, _body(prompt=f"more {number}"))).status == 200
            assert len(drained.seen) == before
            await s.post("/admin/resume", {"url": drained.url}, Authorization="Bearer admin")
            for number in range(6):
                await s.post(TEXT, _body(prompt=f"again {number}"))
            assert len(drained.seen) > before

    run(scenario())


def test_instances_are_added_and_removed_at_run_time(tmp_path):
    async def scenario():
        async with stage(decode=2, admin_key_file=_key(tmp_path)) as s:
            second = s.decode[1]
            await s.post("/admin/remove", {"url": second.url}, Authorization="Bearer admin")
            for number in range(4):
                assert (await s.post(TEXT, _body(prompt=f"{number}"))).status == 200
            assert not second.seen
            added = await s.post("/admin/add", {"url": second.url, "role": "decode"}, Authorization="Bearer admin")
            assert added.status == 200
            await s.settled(lambda: s.gateway.fleet.instances[second.url].up)
            for number in range(4):
                assert (await s.post(TEXT, _body(prompt=f"{number}"))).status == 200
            assert second.seen

    run(scenario())


def test_a_late_joiner_is_used_when_it_comes():
    async def scenario():
        async with stage() as s:
            await s.decode[0].shut()
            await s.settled(lambda: not s.gateway.fleet.instances[s.decode[0].url].up)
            assert (await s.get("/ready")).status == 503
            answer = await s.post(TEXT, _body())
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            await s.decode[0].open()
            await s.settled(lambda: s.gateway.fleet.instances[s.decode[0].url].up)
            assert (await s.get("/ready")).status == 200
            assert (await s.post(TEXT, _body())).status == 200

    run(scenario())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_restart_with_a_new_incarnation_fails_no_request(role):
    async def scenario():
        async with stage(prefill=2, decode=2) as s:
            stop = asyncio.Event()
            statuses: list[int] = []

            async def client(number):
                while not stop.is_set():
                    answer = await s.post(TEXT, _body(prompt=f"{number} {len(statuses)}"))
                    statuses.append(answer.status)

            clients = [asyncio.ensure_future(client(number)) for number in range(8)]
            for engine in getattr(s, role):
                done = len(statuses)
                await s.settled(lambda done=done: len(statuses) > done + 20)
                await engine.restart()
            done = len(statuses)
            await s.settled(lambda: len(statuses) > done + 20)
            stop.set()
            await asyncio.gather(*clients)
            assert set(statuses) == {200}

    run(scenario())


def test_short_prompts_skip_prefill_only_when_told_to():
    async def scenario():
        for threshold, legs in ((0, 1), (100, 0)):
            async with stage(skip_prefill_below=threshold) as s:
                assert (await s.post(TEXT, _body(prompt="short"))).status == 200
                assert len(s.prefill[0].seen) == legs
                assert (await s.post(TEXT, _body(prompt="long " * 1000))).status == 200
                assert len(s.prefill[0].seen) == legs + 1

    run(scenario())


def test_mostly_cached_prompts_skip_prefill_too():
    async def scenario():
        async with stage(skip_prefill_below=100) as s:
            for turn in ("", " and a little more"):
                assert (await s.post(TEXT, _body(prompt="long " * 1000 + turn))).status == 200
            assert len(s.prefill[0].seen) == 1

    run(scenario())


def test_a_decode_is_only_given_what_it_can_read():
    async def scenario():
        async with stage(prefill=2, decode=1) as s:
            for engine, fingerprint in zip((*s.prefill, *s.decode), "aba", strict=True):
                engine.extra_metrics = f'kvferry:layout_info{{fingerprint="{fingerprint}"}} 1.0\n'
            await s.settled(lambda: all(one.report.fingerprint for one in s.gateway.fleet.instances.values()))
            for number in range(8):
                assert (await s.post(TEXT, _body(prompt=f"{number}"))).status == 200
            assert len(s.prefill[0].seen) == 8
            assert not s.prefill[1].seen

    run(scenario())


def test_what_an_engine_says_on_metrics_is_read_to_its_end():
    async def scenario():
        async with stage() as s:
            s.decode[0].extra_metrics = f"# {LONG}\n" + 'kvferry:layout_info{fingerprint="last"} 1.0\n'
            await s.settled(lambda: s.gateway.fleet.instances[s.decode[0].url].report.fingerprint == b"last")

    run(scenario())


def test_every_data_parallel_rank_is_addressed_by_its_header():
    async def scenario():
        async with stage(dp=2) as s:
            for number in range(16):
                await s.post(TEXT, _body(prompt=f"{number}"))
            for engine in (*s.prefill, *s.decode):
                assert {leg.headers["x-data-parallel-rank"] for leg in engine.seen} == {"0", "1"}

    run(scenario())


def test_one_request_id_is_used_throughout():
    async def scenario():
        async with stage() as s:
            answer = await s.post(TEXT, _body())
            ids = [leg.headers["x-request-id"] for leg in (*s.prefill[0].seen, *s.decode[0].seen)]
            assert ids == [REQUEST_ID] * 2
            assert answer.headers["x-request-id"] == REQUEST_ID
            assert REQUEST_ID in answer.json["id"]

    run(scenario())


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "é"])
def test_a_request_id_that_cannot_be_used_is_replaced(given):
    async def scenario():
        async with stage() as s:
            answer = await s.post(TEXT, _body(), **{"X-Request-Id": given})
            (prefill,), (decode,) = s.prefill[0].seen, s.decode[0].seen
            assert prefill.headers["x-request-id"] == decode.headers["x-request-id"] == answer.headers["x-request-id"]
            assert len(answer.headers["x-request-id"]) == 32

    run(scenario())


def test_trace_context_goes_on_both_legs():
    async def scenario():
        async with stage() as s:
            trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "v=1", "baggage": "k=v"}
            await s.post(TEXT, _body(), **trace)
            await s.post(TEXT, _body(), traceparent="junk", tracestate="v=1")
            for engine in (*s.prefill, *s.decode):
                good, bad = engine.seen
                assert {name: good.headers[name] for name in trace} == trace
                assert not trace.keys() & bad.headers.keys()

    run(scenario())


def test_the_access_log_names_legs_instances_and_times(caplog):
    async def scenario():
        async with stage() as s:
            await s.post(TEXT, _body())
            (line,) = [record.getMessage() for record in caplog.records if record.name == "kvferry.access"]
            for part in (f"id={REQUEST_ID}", f"POST {TEXT}", "status=200", "retries=0", "prefill_ms=", "first_ms="):
                assert part in line
            assert f"prefill={s.prefill[0].url}@0 decode={s.decode[0].url}@0" in line

    with caplog.at_level(logging.INFO, "kvferry.access"):
        run(scenario())


def _key(tmp_path, text="admin"):
    file = tmp_path / text.split()[0]
    file.write_text(text)
    return str(file)


def test_clients_without_a_key_are_refused_and_keys_reach_no_engine(tmp_path):
    async def scenario():
        async with stage(api_key_file=_key(tmp_path, "one\ntwo\n")) as s:
            for path in (*BODIES, "/tokenize"):
                for headers in ({}, {"Authorization": "Bearer three"}, {"Authorization": "Bearer "}):
                    answer = await s.post(path, _body(), **headers)
                    assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert (await s.get("/v1/models")).status == 401
            assert (await s.get("/health")).status == 200
            assert not s.prefill[0].seen
            assert (await s.post(TEXT, _body(), Authorization="Bearer two")).status == 200
            assert all("authorization" not in leg.headers for leg in (*s.prefill[0].seen, *s.decode[0].seen))

    run(scenario())


def test_engines_see_the_gateways_key_or_the_clients_where_it_has_none(tmp_path):
    async def scenario():
        async with stage() as s:
            await s.post(TEXT, _body(), Authorization="Bearer clients")
            assert s.decode[0].seen[0].headers["authorization"] == "Bearer clients"
        async with stage(engine_key_file=_key(tmp_path, "engines")) as s:
            await s.post(TEXT, _body(), Authorization="Bearer clients")
            assert s.prefill[0].seen[0].headers["authorization"] == "Bearer engines"

    run(scenario())


def test_admin_needs_its_own_key_and_is_not_there_without_one(tmp_path):
    async def scenario():
        async with stage() as s:
            assert (await s.get("/admin/instances")).status == 404
        keys = {"api_key_file": _key(tmp_path, "client"), "admin_key_file": _key(tmp_path)}
        async with stage(**keys) as s:
            assert (await s.get("/admin/instances", Authorization="Bearer client")).status == 401
            assert (await s.get("/admin/instances", Authorization="Bearer admin")).status == 200
            answer = await s.post("/admin/drain", {"url": "http://unknown:1"}, Authorization="Bearer admin")
            assert answer.status == 404
            for body in (b"", b"[]", b'{"url":5}', b'{"url":"x","role":"decode"}'):
                answer = await s.post("/admin/add", body, Authorization="Bearer admin")
                assert answer.status == 400

    run(scenario())


NOT_THERE = (
    *("/sleep", "/reset_prefix_cache", "/pause", "/collective_rpc", "/v1/load_lora_adapter", "/inference/v1/generate"),
    *("/v1/completions/render", "/v1/completions/", "/v1//completions", "/admin", "/docs", "/%2e%2e/sleep"),
)


def test_what_is_not_listed_is_not_there():
    async def scenario():
        async with stage() as s:
            for path in NOT_THERE:
                answer = await s.post(path, {})
                assert (answer.status, answer.json["error"]["code"]) == (404, 404)
            assert not any(engine.counts or engine.seen for engine in (*s.prefill, *s.decode))

    run(scenario())


def test_a_wrong_method_is_405():
    async def scenario():
        async with stage() as s:
            answer = await s.get(TEXT)
            assert (answer.status, answer.json["error"]["code"], answer.headers["allow"]) == (405, 405, "POST")

    run(scenario())


@pytest.mark.parametrize(
    ("raw", "kind", "status"),
    [(b"{", "application/json", 400), (b"{}", "text/plain", 400), (b"x" * 2000, "application/json", 413)],
)
def test_bad_requests_reach_no_engine(raw, kind, status):
    async def scenario():
        async with stage(max_body_bytes=1000) as s:
            answer = await s.post(TEXT, raw, **{"Content-Type": kind})
            assert (answer.status, answer.json["error"]["code"]) == (status, status)
            assert not s.prefill[0].seen

    run(scenario())


def test_other_routes_pass_through_any_instance():
    async def scenario():
        async with stage(decode=2) as s:
            await s.decode[0].shut()
            assert (await s.get("/v1/models")).json["data"][0]["id"] == "model"
            assert (await s.get("/version")).json == {"version": "0.0"}
            assert (await s.post("/tokenize", {"prompt": "a"})).json["count"] == 1

    run(scenario())


def test_a_silent_decode_is_not_taken_for_a_prefill_that_holds_nothing():
    """A prefill answer without parameters makes decode compute the prompt again, and that is counted."""

    async def scenario():
        async with stage() as s:
            s.prefill[0].faults.append("no parameters")
            assert (await s.post(TEXT, _body())).status == 200
            assert "kv_transfer_params" not in s.decode[0].seen[0].body
            assert b'plain_decodes_total{reason="no_parameters"} 1.0' in (await s.get("/metrics")).body

    run(scenario())


def test_a_fault_of_the_gateway_itself_is_a_500_and_counted():
    class Faulty:
        async def open(self, legs, job):
            raise RuntimeError

    async def scenario():
        async with stage(strategy=Faulty()) as s:
            answer = await s.post(TEXT, _body())
            assert (answer.status, answer.json["error"]["message"]) == (500, "the gateway failed")
            assert answer.headers["x-request-id"] == REQUEST_ID
            assert f'requests_total{{path="{TEXT}",status="500"}} 1.0'.encode() in (await s.get("/metrics")).body

    run(scenario())


def test_engines_are_not_asked_for_compressed_answers():
    async def scenario():
        async with stage() as s:
            await s.post(TEXT, _body())
            assert {leg.headers["accept-encoding"] for leg in (*s.prefill[0].seen, *s.decode[0].seen)} == {"identity"}

    run(scenario())


def test_another_strategy_can_take_the_place_of_prefill_first():
    """The seam for transfers that stream: everything but the order of the legs stays."""

    class DecodeOnly:
        async def open(self, legs, job):
            return await legs.decode(job, None)

    async def scenario():
        async with stage(strategy=DecodeOnly()) as s:
            assert (await s.post(CHAT, json.loads(json.dumps(_body(CHAT))))).status == 200
            assert not s.prefill[0].seen

    run(scenario())
