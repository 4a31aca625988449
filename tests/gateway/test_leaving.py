"""A client that goes away takes everything with it, at once."""

import asyncio
import json
import time

import aiohttp
import pytest

from .stage import BODIES, Stage, run, stage

TEXT, CHAT, RESPONSES = BODIES
LIMIT_S = 0.05


async def _request(s: Stage, path: str, stream: bool) -> asyncio.StreamWriter:
    """A request on a connection of its own."""
    host, port = s.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({**BODIES[path], "stream": stream}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    return writer


async def _leave(writer: asyncio.StreamWriter, seen: asyncio.Event) -> float:
    """Seconds from the client's leaving until an engine knows, without what the machine itself takes.

    A pair of connected sockets shows what a close takes to be seen on this machine at this moment.
    """
    noticed = asyncio.Event()

    async def wait(reader, _):
        await reader.read()
        noticed.set()
        _.close()

    probe = await asyncio.start_server(wait, "127.0.0.1", 0)
    _, other = await asyncio.open_connection(*probe.sockets[0].getsockname())
    started = time.perf_counter()
    writer.close()
    await seen.wait()
    took = time.perf_counter() - started
    started = time.perf_counter()
    other.close()
    await noticed.wait()
    probe.close()
    return took - (time.perf_counter() - started)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_a_client_that_leaves_cancels_the_leg_within_50_ms_and_its_grant_at_once(path, stream, leg):
    """The best of three: the machine may be busy with something else, the gateway may not."""

    async def scenario():
        async with stage() as s:
            engine = getattr(s, leg)[0]
            took = []
            for _ in range(3):
                engine.faults.append("hang")
                engine.hanging.clear()
                engine.gone.clear()
                writer = await _request(s, path, stream)
                await engine.hanging.wait()
                assert s.grants == (leg == "decode")
                took.append(await _leave(writer, engine.gone))
                await s.settled(lambda: s.grants == 0)
            assert min(took) < LIMIT_S, took
            assert engine.left == 3
            said = [f'clients_gone_total{{path="{path}"}} 3.0']
            if leg == "decode":
                said.append('releases_total{outcome="released"} 3.0')
            await s.settled(lambda: all(line in s.gateway.metrics.text().decode() for line in said))

    run(scenario())


def test_a_client_that_leaves_in_the_middle_of_a_stream_stops_decode():
    async def scenario():
        async with stage() as s:
            engine = s.decode[0]
            engine.faults.append("hang between")
            writer = await _request(s, CHAT, True)
            await engine.hanging.wait()
            assert await _leave(writer, engine.gone) < 1
            assert engine.left == 1

    run(scenario())


def test_a_client_that_leaves_takes_all_of_its_prompts():
    async def scenario():
        async with stage() as s:
            engine = s.decode[0]
            engine.faults.extend([None, "hang", "hang"])
            asked = asyncio.create_task(s.post(TEXT, {**BODIES[TEXT], "prompt": ["a", "b", "c"]}))
            await s.settled(lambda: len(engine.seen) == 3)
            asked.cancel()
            await s.settled(lambda: engine.left == 2 and s.grants == 0)
            assert all(rank.requests == 0 for one in s.gateway.fleet.instances.values() for rank in one.ranks)

    run(scenario())


def test_a_client_that_leaves_before_its_body_is_whole_is_forgotten():
    async def scenario():
        async with stage() as s:
            host, port = s.url.removeprefix("http://").split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{{".encode())
            await writer.drain()
            writer.close()
            for _ in range(3):
                assert (await s.post(TEXT, BODIES[TEXT])).status == 200
            assert len(s.prefill[0].seen) == 3

    run(scenario())


@pytest.mark.parametrize("streams", [200, pytest.param(1000, marks=pytest.mark.heavy)])
def test_many_streams_at_once(streams):
    """All are open at the same time, and all end as they should."""

    async def scenario():
        async with stage(connect_timeout=60.0, probe_timeout=20.0) as s:
            s.decode[0].gate = asyncio.Event()
            body = {**BODIES[CHAT], "stream": True}
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as many:
                s.client, kept = many, s.client
                asked = [asyncio.create_task(s.post(CHAT, body)) for _ in range(streams)]
                while len(s.decode[0].seen) < streams:
                    assert not any(task.done() for task in asked)
                    await asyncio.sleep(0.01)
                s.decode[0].gate.set()
                answers = await asyncio.gather(*asked)
                s.client = kept
            assert {answer.status for answer in answers} == {200}
            assert all(answer.events[-1] == "[DONE]" for answer in answers)
            assert s.grants == 0

    run(scenario())
