"""The life of a cluster: it serves when its pairs have proved themselves, survives crashes, resizes, drains, and leaves
nothing. Engines are stand-ins; keepers, guards, control socket and gateway are the real ones."""

import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.cluster import control, keeper, pulse, session
from kvferry.cluster.control import Request
from kvferry.errors import ClusterError, KVFerryError, StartError

from .clusters import DEADLINE_S, Cluster, gone, manifest, started, until

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "BACKOFF_S", (0.1, 0.2))
    monkeypatch.setattr(pulse, "SETTLE_S", 0.3)


def _counter(url: str, name: str) -> int:
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    return int(sum(float(value) for value in re.findall(rf"^{name}\S* (\S+)", text, re.MULTILINE)))


def _await_restart(cluster: Cluster, name: str, times: int) -> None:
    until(lambda: cluster.instance(name).restarts == times, f"restarting {name}")
    until(lambda: cluster.instance(name).state == "ready", f"{name} being ready again")


def _prefill(url: str, held_s: float) -> None:
    leg = {"prompt": [1], "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}, "held_s": held_s}
    httpx.post(f"{url}/v1/completions", json=leg, trust_env=False)


def _arguments(url: str) -> Any:
    return httpx.get(f"{url}/arguments", trust_env=False).json()


def test_it_serves_once_every_pair_of_ranks_has_moved_a_prompt(tmp_path: Path) -> None:
    sides = {"prefill": {"layout": "pp=2", "replicas": 2}, "decode": {"layout": "dp=2"}}
    with started(tmp_path, **sides, environment={"NAME": "value"}, vllm={"seed": 3}) as cluster:
        status = control.status(cluster.state)
        assert [one.name for one in status.instances] == ["prefill-0", "prefill-1", "decode-0", "gateway"]
        assert {one.state for one in status.instances} == {"ready"}
        decode = cluster.instance("decode-0")
        assert _counter(decode.url, "vllm:nixl_bytes_transferred_sum") >= 2 * 2 * 1000
        answer = cluster.ask()
        assert (answer.status_code, answer.json()["choices"][0]["message"]["content"][:6]) == (200, "word0 ")
        started_with = _arguments(decode.url)
        assert started_with["argv"][-2:] == ["--seed", "3"]
        assert started_with["environment"]["NAME"] == "value"
        config = json.loads(started_with["argv"][started_with["argv"].index("--kv-transfer-config") + 1])
        assert config["kv_connector_extra_config"]["secret_file"] == str(cluster.state.secret)
        processes = cluster.processes()
        assert len(processes) >= 8
    assert cluster.served
    assert all(map(gone, processes))


def test_engines_that_answer_and_move_nothing_do_not_serve(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, manifest(tmp_path, environment={"STANDIN_READS_NOTHING": "1"}))
    cluster.start()
    cluster.join()
    cluster.state.release()
    assert isinstance(cluster.error, StartError)
    assert "prefill-0 and decode-0 do not exchange KV caches" in str(cluster.error)
    assert "says that it read nothing" in str(cluster.error)
    assert cluster.processes() == []


def test_an_instance_that_dies_during_start_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    dying = {"decode-0": {"environment": {"STANDIN_DIES": "no room for the weights"}}}
    cluster = Cluster(tmp_path, manifest(tmp_path, instances=dying))
    cluster.start()
    cluster.join()
    cluster.state.release()
    lines = str(cluster.error).splitlines()
    assert lines[0] == "decode-0 ended with exit code 1: ValueError: no room for the weights"
    assert "  | loading the weights" in lines
    assert cluster.processes() == []


def test_a_crashed_instance_is_restarted_and_requests_go_on(tmp_path: Path) -> None:
    with started(tmp_path, decode={"replicas": 2}) as cluster:
        for victim, times in (("prefill-0", 1), ("decode-1", 1), ("decode-1", 2)):
            cluster.process(victim).kill()
            assert cluster.ask().status_code == 200, f"after kill {times} of {victim}"
            _await_restart(cluster, victim, times)
        one = cluster.instance("decode-1")
        assert one.restarts == 2
        assert one.detail.startswith("decode-1 ended with exit code")
        assert cluster.view.states_of("decode-1").count("restarting") == 2
        assert (cluster.state.logs / "decode-1.previous.log").exists()
        assert cluster.ask().status_code == 200


def test_an_instance_that_stays_unwell_is_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "UNWELL_S", 0.3)
    monkeypatch.setattr(keeper, "LOOK_EVERY_S", 0.1)
    with started(tmp_path) as cluster:
        httpx.post(f"{cluster.instance('decode-0').url}/unwell", json={}, trust_env=False)
        _await_restart(cluster, "decode-0", 1)
        assert "unwell" in cluster.instance("decode-0").detail


def test_a_crashed_gateway_comes_back_with_the_members_of_now(tmp_path: Path) -> None:
    with started(tmp_path) as cluster:
        assert cluster.scale(decode=2) == "prefill=1, decode=2"
        cluster.process("gateway").kill()
        _await_restart(cluster, "gateway", 1)
        assert httpx.get(f"{cluster.url}/ready", trust_env=False).json() == {"prefill": 1, "decode": 2}
        assert cluster.ask().status_code == 200


def test_scaling_under_load_fails_no_request(tmp_path: Path) -> None:
    end = threading.Event()

    def client(number: int) -> list[str]:
        answers = []
        while not end.is_set():
            answer = cluster.ask(6, stream=number % 2 == 0)
            whole = answer.status_code == 200 and "word5" in answer.text
            answers.append("right" if whole else f"{answer.status_code} {answer.text}")
        return answers

    with started(tmp_path, environment={"STANDIN_PACE_S": "0.02"}) as cluster, ThreadPoolExecutor(6) as pool:
        clients = [pool.submit(client, number) for number in range(6)]
        try:
            assert cluster.scale(prefill=2, decode=3) == "prefill=2, decode=3"
            before = cluster.instance("decode-2")
            used = until(lambda: _counter(before.url, "vllm:nixl_bytes_transferred_sum"), "the new one being used")
            assert used
            assert cluster.scale(prefill=1, decode=1) == "prefill=1, decode=1"
        finally:
            end.set()
        answers = [answer for one in clients for answer in one.result(DEADLINE_S)]
    assert set(answers) == {"right"}
    assert cluster.instance("decode-2") is None


def test_a_prefill_that_holds_what_is_still_to_be_read_is_not_taken_away(tmp_path: Path) -> None:
    with started(tmp_path, prefill={"replicas": 2}) as cluster:
        _prefill(cluster.instance("prefill-1").url, held_s=2.0)
        begin = time.monotonic()
        assert cluster.scale(prefill=1) == "prefill=1, decode=1"
        assert time.monotonic() - begin > 1.5


def test_a_further_prefill_that_nobody_reads_from_is_not_added(tmp_path: Path) -> None:
    """Decode's counters grow all the same, for others."""
    unread = {"prefill-1": {"environment": {"STANDIN_HOLDS_S": "600"}}}
    with started(tmp_path, instances=unread) as cluster:
        with pytest.raises(KVFerryError, match=r"prefill-1 and decode-0 do not exchange KV caches: .* still holds"):
            cluster.scale(prefill=2)
        assert cluster.instance("prefill-1") is None


def test_draining_ends_when_its_time_is_up(tmp_path: Path) -> None:
    with started(tmp_path, prefill={"replicas": 2}, drain_timeout=0.5) as cluster:
        _prefill(cluster.instance("prefill-1").url, held_s=600.0)
        assert cluster.scale(prefill=1) == "prefill=1, decode=1"


def test_a_replica_that_does_not_start_is_not_added(tmp_path: Path) -> None:
    dying = {"decode-1": {"environment": {"STANDIN_DIES": "no room"}}}
    with started(tmp_path, instances=dying) as cluster:
        with pytest.raises(KVFerryError, match="decode-1 ended with exit code 1: ValueError: no room"):
            cluster.scale(decode=3)
        assert [one.name for one in cluster.session.status().instances] == ["prefill-0", "decode-0", "gateway"]
        assert cluster.ask().status_code == 200


def test_what_cannot_be_done_is_refused(tmp_path: Path) -> None:
    refused = ((Request("scale", decode=0), "decode=0 must be between 1 and"), (Request("jump"), "cannot 'jump'"))
    with started(tmp_path) as cluster:
        for request, said in refused:
            with pytest.raises(ClusterError, match=said), control.asked(cluster.state, request):
                pass


def test_stopping_lets_requests_under_way_finish_and_takes_no_new_ones(tmp_path: Path) -> None:
    with started(tmp_path, environment={"STANDIN_PACE_S": "0.1"}) as cluster, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(cluster.ask, 20, stream=True)
        until(lambda: _counter(cluster.instance("decode-0").url, "vllm:num_requests_running"), "decoding")
        cluster.session.request_stop()
        until(lambda: cluster.session.status().state == "draining", "draining")
        until(lambda: _refused(cluster), "taking nothing new")
        assert not waiting.done()
        assert "word19" in waiting.result(DEADLINE_S).text
        cluster.join()
        assert cluster.processes() == []


def _refused(cluster: Cluster) -> bool:
    try:
        return cluster.ask(1).status_code == 503
    except httpx.TransportError:
        return True


def test_a_second_request_to_stop_does_not_wait_for_requests(tmp_path: Path) -> None:
    with started(tmp_path, environment={"STANDIN_PACE_S": "1"}) as cluster, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(cluster.ask, 100, stream=True)
        until(lambda: _counter(cluster.instance("decode-0").url, "vllm:num_requests_running"), "decoding")
        cluster.session.request_stop()
        cluster.session.request_stop()
        cluster.join()
        assert cluster.processes() == []
        assert waiting.exception(DEADLINE_S) or "word99" not in waiting.result().text


def test_a_port_that_nobody_asked_for_and_somebody_took_is_replaced(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, manifest(tmp_path))
    taken = int(cluster.url.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", taken)):
        cluster.start()
        cluster.await_serving()
        assert cluster.url != f"http://127.0.0.1:{taken}"
        assert cluster.ask().status_code == 200
        assert cluster.scale(decode=2) == "prefill=1, decode=2"
        cluster.stop()


def test_the_gateway_of_somebody_else_is_not_taken_for_the_own_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it had begun to listen right after its port was seen to be free."""
    with started(tmp_path / "theirs") as theirs:
        answers = iter([True])
        monkeypatch.setattr(session, "is_free", lambda *_: next(answers, False))
        ours = Cluster(tmp_path / "ours", manifest(tmp_path / "ours"))
        ours.session._front = replace(ours.session._front, port=int(theirs.url.rpartition(":")[2]))
        ours.start()
        ours.await_serving()
        assert ours.url != theirs.url
        assert next(answers, None) is None
        assert (ours.state.logs / "gateway.previous.log").exists()
        ours.stop()


def test_stopping_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, manifest(tmp_path))
    cluster.start()
    until(cluster.processes, "starting")
    cluster.stop()
    assert cluster.served is False
    assert cluster.processes() == []
