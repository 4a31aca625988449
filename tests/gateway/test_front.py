"""The rules of docs/gateway.md for what clients may say, reach and see, each held by the test named after it."""

import logging

import pytest

from .stage import BODIES, REQUEST_ID, body_of, key_file, run, stage

TEXT, CHAT, RESPONSES = BODIES
EVERYWHERE = pytest.mark.parametrize("path", BODIES)


@EVERYWHERE
def test_client_sent_transfer_parameters_and_internal_headers_reach_no_engine(path):
    async def scenario():
        async with stage() as s:
            poison = {"kv_transfer_params": {"remote_host": "evil"}, "ec_transfer_params": {"x": 1}}
            headers = {"X-data-parallel-rank": "7", "X-Internal": "1", "Cookie": "a=b", "X-Forwarded-For": "1.2.3.4"}
            assert (await s.post(path, {**body_of(path), **poison}, **headers)).status == 200
            assert (await s.post(path, {**body_of(path), **poison, "use_beam_search": True}, **headers)).status == 200
            for leg in (*s.prefill[0].seen, *s.decode[0].seen):
                assert b"evil" not in leg.raw
                assert "ec_transfer_params" not in leg.body
                assert not {"x-data-parallel-rank", "x-internal", "cookie", "x-forwarded-for"} & leg.headers.keys()

    run(scenario())


def test_one_request_id_is_used_throughout():
    async def scenario():
        async with stage() as s:
            answer = await s.post(TEXT, body_of())
            ids = [leg.headers["x-request-id"] for leg in (*s.prefill[0].seen, *s.decode[0].seen)]
            assert ids == [REQUEST_ID] * 2
            assert answer.headers["x-request-id"] == REQUEST_ID
            assert REQUEST_ID in answer.json["id"]

    run(scenario())


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "é"])
def test_a_request_id_that_cannot_be_used_is_replaced(given):
    async def scenario():
        async with stage() as s:
            answer = await s.post(TEXT, body_of(), **{"X-Request-Id": given})
            (prefill,), (decode,) = s.prefill[0].seen, s.decode[0].seen
            assert prefill.headers["x-request-id"] == decode.headers["x-request-id"] == answer.headers["x-request-id"]
            assert len(answer.headers["x-request-id"]) == 32

    run(scenario())


def test_trace_context_goes_on_both_legs():
    async def scenario():
        async with stage() as s:
            trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "v=1", "baggage": "k=v"}
            await s.post(TEXT, body_of(), **trace)
            await s.post(TEXT, body_of(), traceparent="junk", tracestate="v=1")
            for engine in (*s.prefill, *s.decode):
                good, bad = engine.seen
                assert {name: good.headers[name] for name in trace} == trace
                assert not trace.keys() & bad.headers.keys()

    run(scenario())


def test_the_access_log_names_legs_instances_and_times(caplog):
    async def scenario():
        async with stage() as s:
            await s.post(TEXT, body_of())
            (line,) = [record.getMessage() for record in caplog.records if record.name == "kvferry.access"]
            for part in (f"id={REQUEST_ID}", f"POST {TEXT}", "status=200", "retries=0", "prefill_ms=", "first_ms="):
                assert part in line
            assert f"prefill={s.prefill[0].url}@0 decode={s.decode[0].url}@0" in line

    with caplog.at_level(logging.INFO, "kvferry.access"):
        run(scenario())


def test_clients_without_a_key_are_refused_and_keys_reach_no_engine(tmp_path):
    async def scenario():
        async with stage(api_key_file=key_file(tmp_path, "one\ntwo\n")) as s:
            for path in (*BODIES, "/tokenize"):
                for headers in ({}, {"Authorization": "Bearer three"}, {"Authorization": "Bearer "}):
                    answer = await s.post(path, body_of(), **headers)
                    assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert (await s.get("/v1/models")).status == 401
            assert (await s.get("/health")).status == 200
            assert not s.prefill[0].seen
            assert (await s.post(TEXT, body_of(), Authorization="Bearer two")).status == 200
            assert all("authorization" not in leg.headers for leg in (*s.prefill[0].seen, *s.decode[0].seen))

    run(scenario())


def test_engines_see_the_gateways_key_or_the_clients_where_it_has_none(tmp_path):
    async def scenario():
        async with stage() as s:
            await s.post(TEXT, body_of(), Authorization="Bearer clients")
            assert s.decode[0].seen[0].headers["authorization"] == "Bearer clients"
        async with stage(engine_key_file=key_file(tmp_path, "engines")) as s:
            await s.post(TEXT, body_of(), Authorization="Bearer clients")
            assert s.prefill[0].seen[0].headers["authorization"] == "Bearer engines"

    run(scenario())


def test_admin_needs_its_own_key_and_is_not_there_without_one(tmp_path):
    async def scenario():
        async with stage() as s:
            assert (await s.get("/admin/instances")).status == 404
        keys = {"api_key_file": key_file(tmp_path, "client"), "admin_key_file": key_file(tmp_path)}
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


def test_engines_are_not_asked_for_compressed_answers():
    async def scenario():
        async with stage() as s:
            await s.post(TEXT, body_of())
            assert {leg.headers["accept-encoding"] for leg in (*s.prefill[0].seen, *s.decode[0].seen)} == {"identity"}

    run(scenario())
