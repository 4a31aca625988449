"""The rules of docs/gateway.md for instances that come, go, differ and fill, each held by the test named after it."""

import asyncio

import pytest

from .stage import BODIES, body_of, key_file, run, stage
from .standin import LONG

TEXT, CHAT, RESPONSES = BODIES


def test_a_drained_instance_gets_nothing_new_and_finishes_what_it_has(tmp_path):
    async def scenario():
        async with stage(decode=2, admin_key_file=key_file(tmp_path)) as s:
            drained, other = s.decode
            drained.gate = other.gate = asyncio.Event()
            under_way = [asyncio.ensure_future(s.post(TEXT, body_of(prompt=f"{n}"))) for n in range(4)]
            await s.settled(lambda: len(drained.seen) + len(other.seen) == 4)
            before = len(drained.seen)
            assert before
            listed = await s.post("/admin/drain", {"url": drained.url}, Authorization="Bearer admin")
            assert [one["draining"] for one in listed.json if one["url"] == drained.url] == [True]
            drained.gate.set()
            assert [answer.status for answer in await asyncio.gather(*under_way)] == [200] * 4
            for number in range(6):
                assert (await s.post(TEXT, body_of(prompt=f"more {number}"))).status == 200
            assert len(drained.seen) == before
            await s.post("/admin/resume", {"url": drained.url}, Authorization="Bearer admin")
            for number in range(6):
                await s.post(TEXT, body_of(prompt=f"again {number}"))
            assert len(drained.seen) > before

    run(scenario())


def test_instances_are_added_and_removed_at_run_time(tmp_path):
    async def scenario():
        async with stage(decode=2, admin_key_file=key_file(tmp_path)) as s:
            second = s.decode[1]
            await s.post("/admin/remove", {"url": second.url}, Authorization="Bearer admin")
            for number in range(4):
                assert (await s.post(TEXT, body_of(prompt=f"{number}"))).status == 200
            assert not second.seen
            added = await s.post("/admin/add", {"url": second.url, "role": "decode"}, Authorization="Bearer admin")
            assert added.status == 200
            await s.settled(lambda: s.gateway.fleet.instances[second.url].up)
            for number in range(4):
                assert (await s.post(TEXT, body_of(prompt=f"{number}"))).status == 200
            assert second.seen

    run(scenario())


def test_a_shared_file_that_cannot_be_read_ends_no_probing(tmp_path):
    async def scenario():
        async with stage(decode=2, probe_interval=0.01, shared_file=str(tmp_path / "members")) as s:
            (tmp_path / "members").write_text("[not JSON")
            await s.decode[1].shut()
            await s.settled(lambda: not s.gateway.fleet.instances[s.decode[1].url].up)
            assert (await s.post("/v1/completions", BODIES["/v1/completions"])).status == 200

    run(scenario())


def test_a_late_joiner_is_used_when_it_comes():
    async def scenario():
        async with stage() as s:
            await s.decode[0].shut()
            await s.settled(lambda: not s.gateway.fleet.instances[s.decode[0].url].up)
            assert (await s.get("/ready")).status == 503
            answer = await s.post(TEXT, body_of())
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            await s.decode[0].open()
            await s.settled(lambda: s.gateway.fleet.instances[s.decode[0].url].up)
            assert (await s.get("/ready")).status == 200
            assert (await s.post(TEXT, body_of())).status == 200

    run(scenario())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_restart_with_a_new_incarnation_fails_no_request(role):
    async def scenario():
        async with stage(prefill=2, decode=2) as s:
            stop = asyncio.Event()
            statuses: list[int] = []

            async def client(number):
                while not stop.is_set():
                    answer = await s.post(TEXT, body_of(prompt=f"{number} {len(statuses)}"))
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
                assert (await s.post(TEXT, body_of(prompt="short"))).status == 200
                assert len(s.prefill[0].seen) == legs
                assert (await s.post(TEXT, body_of(prompt="long " * 1000))).status == 200
                assert len(s.prefill[0].seen) == legs + 1

    run(scenario())


def test_mostly_cached_prompts_skip_prefill_too():
    async def scenario():
        async with stage(skip_prefill_below=100) as s:
            for turn in ("", " and a little more"):
                assert (await s.post(TEXT, body_of(prompt="long " * 1000 + turn))).status == 200
            assert len(s.prefill[0].seen) == 1

    run(scenario())


def test_a_decode_is_only_given_what_it_can_read():
    async def scenario():
        async with stage(prefill=2, decode=1) as s:
            for engine, fingerprint in zip((*s.prefill, *s.decode), "aba", strict=True):
                engine.extra_metrics = f'kvferry:layout_info{{fingerprint="{fingerprint}"}} 1.0\n'
            await s.settled(lambda: all(one.report.fingerprint for one in s.gateway.fleet.instances.values()))
            for number in range(8):
                assert (await s.post(TEXT, body_of(prompt=f"{number}"))).status == 200
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
                await s.post(TEXT, body_of(prompt=f"{number}"))
            for engine in (*s.prefill, *s.decode):
                assert {leg.headers["x-data-parallel-rank"] for leg in engine.seen} == {"0", "1"}

    run(scenario())
