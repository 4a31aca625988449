"""Pairs of running instances: what their counters say, and what they cannot say."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from kvferry.cluster.control import ClusterStatus, ControlServer, InstanceStatus
from kvferry.cluster.doctor import pairs
from kvferry.cluster.doctor.findings import Finding, Level
from kvferry.cluster.doctor.pairs import Connected, Instance, Seen, Works
from kvferry.cluster.manifest import Role
from kvferry.cluster.state import StateDirectory
from kvferry.errors import ClusterError, SpecError

PREFILL = [Instance(f"prefill-{index}", Role.PREFILL, f"http://p{index}") for index in range(2)]
DECODE = Instance("decode-0", Role.DECODE, "http://d", "tp=2,pp=1,dp=1")


def metrics(fingerprint: str | None = "abc", loads: int = 0, failed: int = 0) -> str:
    """As two engine cores of an instance say it."""
    lines = ["# HELP kvferry:layout_info Engines", "# TYPE kvferry:layout_info gauge", "vllm:num_requests_running 3.0"]
    for engine in "01":
        label = f'engine="{engine}",model_name="m"'
        if fingerprint:
            lines.append(f'kvferry:layout_info{{{label},fingerprint="{fingerprint}"}} 1.0')
        lines.append(f"vllm:nixl_xfer_time_seconds_count{{{label}}} {loads / 2}")
        lines.append(f"vllm:nixl_bytes_transferred_sum{{{label}}} {loads * 500}.0")
        lines.append(f"vllm:nixl_num_failed_transfers_total{{{label}}} {failed if engine == '0' else 0}.0")
    return "\n".join(lines) + "\n"


@contextmanager
def serving(text: str, status: int = 200) -> Iterator[str]:
    """The URL of something whose ``/metrics`` is that."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Nowhere."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def _pair(prefill: list[str | None], decode: str | None, loads: int = 0) -> list[tuple[Works, Connected]]:
    seen = [pairs.parse(one, metrics(text)) for one, text in zip(PREFILL, prefill, strict=False)]
    seen.append(pairs.parse(DECODE, metrics(decode, loads)))
    return [(pair.works, pair.connected) for pair in pairs.pairs(seen)]


def test_metrics_are_summed_over_engine_cores() -> None:
    assert pairs.parse(DECODE, metrics("abc", 4, 1)) == Seen(DECODE, None, ("abc",), 4, 4000, 1)
    assert pairs.parse(DECODE, "") == Seen(DECODE)
    assert pairs.parse(DECODE, 'kvferry:layout_info{fingerprint="old"} 0.0\n').fingerprints == ()


def test_equal_layouts_can_work_and_others_cannot() -> None:
    assert _pair(["abc"], "abc") == [(Works.YES, Connected.NO)]
    assert _pair(["abd"], "abc") == [(Works.NO, Connected.NO)]
    assert _pair([None], "abc") == _pair(["abc"], None) == [(Works.UNKNOWN, Connected.NO)]


def test_who_was_read_from_is_said_only_where_it_is_known() -> None:
    """Counters do not name the other side: with one that is possible it was that one, with two it is not known."""
    assert _pair(["abc"], "abc", loads=2) == [(Works.YES, Connected.YES)]
    assert _pair(["abc", "abc"], "abc", loads=2) == [(Works.YES, Connected.PERHAPS)] * 2
    assert _pair(["abc", "abd"], "abc", loads=2) == [(Works.YES, Connected.YES), (Works.NO, Connected.NO)]
    assert _pair(["abc", None], "abc", loads=2)[0] == (Works.YES, Connected.PERHAPS)


def _levels(found: list[Finding]) -> dict[str, Level]:
    return {finding.name: finding.level for finding in found}


def test_real_answers_become_findings() -> None:
    """One instance that works, one of another model, one that fails loads, one that is not there."""
    with ExitStack() as stack:
        good, other, bad, down = (
            stack.enter_context(serving(*answer))
            for answer in ((metrics(),), (metrics("other"),), (metrics(loads=2, failed=1),), ("", 503))
        )
        instances = [
            *(pairs.given(Role.PREFILL, index, url) for index, url in enumerate((good, other, down))),
            pairs.given(Role.DECODE, 0, f"{bad}/"),
        ]
        lines, found = pairs.examine(instances)
    assert _levels(lines) == {
        "prefill-0": Level.OK,
        "prefill-1": Level.OK,
        "prefill-2": Level.PROBLEM,
        "decode-0": Level.WARNING,
        "prefill-0 -> decode-0": Level.OK,
        "prefill-1 -> decode-0": Level.PROBLEM,
        "prefill-2 -> decode-0": Level.WARNING,
    }
    assert [pair.works for pair in found] == [Works.YES, Works.NO, Works.UNKNOWN]
    assert "503" in lines[2].text
    assert "2 loads of 2,000 bytes, 1 failed" in lines[3].text
    assert all(bool(line.fix) == (line.level is not Level.OK) for line in lines)


@pytest.mark.parametrize("text", [metrics(None), "<html>not metrics</html>", "\x00\xff" * 100])
def test_an_instance_that_does_not_say_its_layout_is_a_warning(text: str) -> None:
    """Of another connector, or no vLLM at all."""
    with serving(text) as url:
        line = pairs.examine([pairs.given(Role.DECODE, 0, url)])[0][0]
    assert line.level is Level.WARNING
    assert "does not say its layout" in line.text


def test_endless_metrics_are_not_read_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "MOST_METRICS", 1000)
    with serving(metrics() * 100) as url:
        (seen,) = pairs.ask([pairs.given(Role.DECODE, 0, url)])
    assert "more than 1000 bytes" in str(seen.error)


def test_a_side_that_is_missing_is_a_problem() -> None:
    with serving(metrics()) as url:
        lines, found = pairs.examine([pairs.given(Role.DECODE, 0, url)])
    assert found == []
    assert lines[-1].level is Level.PROBLEM
    assert "there is no prefill instance" in lines[-1].text


@pytest.mark.parametrize("url", ["", "host:8000", "ftp://host", "http://", "http://host:99999999", "http://[::1"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(SpecError, match="is not a URL"):
        pairs.given(Role.PREFILL, 0, url)


def test_the_instances_of_a_running_cluster_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its gateway; and where none runs, that is said."""
    monkeypatch.setenv("KVFERRY_STATE", str(tmp_path))
    state = StateDirectory("blue")
    state.acquire()
    roles = {"prefill-0": "prefill", "decode-0": "decode", "gateway": "gateway"}
    instances = tuple(
        InstanceStatus(name, role, "tp=2,pp=1,dp=1", (), f"http://127.0.0.1:{port}", "", "serving", 0.0)
        for port, (name, role) in enumerate(roles.items(), 1)
    )
    status = ClusterStatus("blue", "serving", "", "m", 1, "", instances)
    with ControlServer(state, lambda _: status):
        found = pairs.of_cluster("blue")
    state.release()
    assert [(one.name, one.role, one.layout) for one in found] == [
        ("prefill-0", Role.PREFILL, "tp=2,pp=1,dp=1"),
        ("decode-0", Role.DECODE, "tp=2,pp=1,dp=1"),
    ]
    with pytest.raises(ClusterError, match="no cluster named blue"):
        pairs.of_cluster("blue")
