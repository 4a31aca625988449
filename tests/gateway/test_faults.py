"""A small exhaustive model, and random runs: every fault at every point. No request is lost silently, no status is a
lie, and no grant is left.

A fault that is noticed by time alone (an engine that hangs) is in the random runs and in test_rules.py.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random

import pytest

from .stage import BODIES, Answer, Stage, run, stage
from .standin import FAULTS, StandIn

STREAMS = (False, True)
NO_FAULT = None
OF_PREFILL = (NO_FAULT, *(fault for fault in FAULTS if fault not in ("hang", "error first")))
OF_DECODE = (NO_FAULT, *(fault for fault in FAULTS if fault not in ("hang", "no parameters")))
PAIRS = tuple(itertools.product(OF_PREFILL, OF_DECODE))
SINGLE = tuple(pair for pair in PAIRS if NO_FAULT in pair)
CONCURRENCY = 16


def _is_whole(answer: Answer, good: Answer, stream: bool) -> bool:
    if answer.status != 200 or answer.broken:
        return False
    return _without_cached(answer.events if stream else answer.json) == _without_cached(
        good.events if stream else good.json
    )


def _without_cached(value):
    """Where decode prefilled, its own cached tokens are the true ones."""

    def without(found: dict) -> dict:
        return {key: value for key, value in found.items() if key != "cached_tokens"}

    return json.loads(json.dumps(value), object_hook=without)


def _is_honest(answer: Answer, stream: bool) -> bool:
    """An error that any client notices: a status with an error object, or an event that ends the stream."""
    if answer.status != 200:
        return answer.status >= 400 and bool(answer.json["error"]["message"])
    last = answer.events[-1] if stream and answer.events else {}
    return not answer.broken and isinstance(last, dict) and ("error" in last or last.get("type") == "error")


async def _apply(engine: StandIn, fault: str | None, times: int) -> None:
    if fault == "refuse":
        await engine.shut()
    else:
        engine.faults.extend([fault] * times)


async def _recover(s: Stage) -> None:
    for engine in (*s.prefill, *s.decode):
        engine.faults.clear()
        if not engine.listening:
            await engine.open()
    await s.settled(lambda: all(instance.up for instance in s.gateway.fleet.instances.values()))


def _must_succeed(prefill: str | None, decode: str | None, spare: bool) -> bool:
    """Prefill may fail in any way but a refusal of the request; decode may fail once, before its first byte, if there
    is another one.
    """
    if prefill == "400" or decode == "400":
        return False
    return decode is NO_FAULT or (spare and decode not in ("half", "junk", "close after head"))


@pytest.mark.parametrize("streaming", [False, True], ids=["prefill first", "both at once"])
@pytest.mark.parametrize("stream", STREAMS, ids=["whole", "stream"])
@pytest.mark.parametrize("path", BODIES)
def test_every_fault_at_every_leg_is_survived_or_told(path, stream, streaming):
    """With and without a second decode instance; for completions, all pairs of faults of the two legs."""
    body = {**BODIES[path], "stream": stream}

    async def scenario():
        async with StandIn() as plain, stage(decode=2, probe_interval=0.01, streaming=streaming) as s:
            good = await s.post(path, body, url=plain.url)
            for prefill, decode in PAIRS if path == "/v1/completions" else SINGLE:
                for spare in (False, True) if NO_FAULT in (prefill, decode) else (True,):
                    await _apply(s.prefill[0], prefill, 3)
                    await _apply_to_decodes(s, decode, spare)
                    answer = await s.post(path, body)
                    case = (prefill, decode, spare, answer.status, answer.body[:300])
                    whole = _is_whole(answer, good, stream)
                    assert whole or _is_honest(answer, stream), case
                    assert whole or not _must_succeed(prefill, decode, spare), case
                    await s.settled(lambda: s.grants == 0, case)
                    await _recover(s)

    run(scenario())


async def _apply_to_decodes(s: Stage, fault: str | None, spare: bool) -> None:
    first, second = s.decode
    if not spare:
        for engine in s.decode:
            await _apply(engine, fault, 3)
        return
    if fault == "refuse":
        await first.shut()
        return
    # One queue for both: only the first request to arrive anywhere fails.
    shared = type(first.faults)([fault])
    first.faults = second.faults = shared


@pytest.mark.parametrize("streaming", [False, True], ids=["prefill first", "both at once"])
@pytest.mark.parametrize("seed", range(3))
def test_random_faults_lose_no_request_and_leave_no_grant(seed, streaming):
    """Two and two engines, sixteen clients at once, engines that fail, die and come back at random."""
    draw = random.Random(seed)

    async def client(s: Stage, plain: StandIn, jobs: list) -> list:
        outcomes = []
        while jobs:
            path, body = jobs.pop()
            good = await s.post(path, body, url=plain.url)
            answer = await s.post(path, body)
            stream = bool(body.get("stream"))
            whole = _is_whole(answer, good, stream)
            assert whole or _is_honest(answer, stream), (seed, body, answer)
            outcomes.append(whole)
        return outcomes

    async def trouble(s: Stage, done: asyncio.Event) -> None:
        engines = (*s.prefill, *s.decode)
        while not done.is_set():
            engine = draw.choice(engines)
            if draw.random() < 0.1:
                await engine.restart()
            else:
                engine.faults.append("hang" if draw.random() < 0.01 else draw.choice(OF_DECODE[2:]))
            await asyncio.sleep(0.005)

    async def scenario():
        # Long enough that a busy machine is not taken for an engine that hangs: an answer that was on its way when its
        # leg was given up is known to nobody, and only the lease ends its grant.
        limits = {
            "prefill_timeout": 1.5,
            "deadline": 4.0,
            "probe_interval": 0.02,
            "breaker_failures": 5,
            "streaming": streaming,
        }
        async with StandIn() as plain, stage(prefill=2, decode=2, breaker_pause=0.05, **limits) as s:
            jobs = [_random_job(draw) for _ in range(150)]
            done = asyncio.Event()
            troubling = asyncio.create_task(trouble(s, done))
            results = await asyncio.gather(*(client(s, plain, jobs) for _ in range(CONCURRENCY)))
            done.set()
            await troubling
            outcomes = [outcome for result in results for outcome in result]
            assert len(outcomes) == 150
            assert sum(outcomes) > 75, f"seed {seed}: only {sum(outcomes)} of 150 were answered"
            await s.settled(lambda: s.grants == 0, seed)
            assert all(rank.requests == 0 for one in s.gateway.fleet.instances.values() for rank in one.ranks)

    run(scenario())


def _random_job(draw: random.Random) -> tuple[str, dict]:
    path = draw.choice(list(BODIES))
    body = {**BODIES[path], "stream": draw.random() < 0.5}
    if path == "/v1/completions":
        body["prompt"] = f"prompt {draw.random()}"
    return path, body


def test_the_stand_in_itself_holds_grants_until_they_are_fetched():
    async def scenario():
        async with stage() as s:
            asked = {**BODIES["/v1/completions"], "kv_transfer_params": {"do_remote_decode": True}}
            parameters = (await s.post("/v1/completions", asked, url=s.prefill[0].url)).json["kv_transfer_params"]
            assert s.grants == 1
            body = {**BODIES["/v1/completions"], "kv_transfer_params": parameters}
            assert (await s.post("/v1/completions", body, url=s.decode[0].url)).status == 200
            assert (s.grants, s.decode[0].fetched) == (0, 1)

    run(scenario())
