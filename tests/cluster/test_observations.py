"""What is read from an instance's counters, from the transfer log and from a dead process' log."""

from pathlib import Path

import pytest

from kvferry.cluster import logs
from kvferry.cluster.metrics import PrefixHits
from kvferry.cluster.transfers import await_transfers, read_transfers

METRICS = """\
# HELP vllm:prefix_cache_hits_total Prefix cache hits
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 128.0
vllm:prefix_cache_hits_total{engine="1",model_name="m"} 256.0
vllm:prefix_cache_hits_created{engine="0",model_name="m"} 1.7e+09
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 9999.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 7.0
vllm:external_prefix_cache_hits_total{engine="1",model_name="m"} 1e3
"""
LINE = (
    '{"request":"cmpl-a-0-12","incarnation":"i","consumer":{"dp":1,"pp":0,"tp":1},"reads":[{"producer":'
    '{"dp":null,"pp":1,"tp":0},"bytes":4096,"descriptors":2}],"tokens":7,"ms":1.5,"result":"held"}\n'
)
ENGINE_LOG = """\
INFO starting
\x1b[36m(Worker pid=7)\x1b[0m ERROR 11-30 04:00:00 [multiproc_executor.py:1] WorkerProc failed to start.
(Worker pid=7) ERROR 11-30 04:00:00 [x.py:1] ValueError: Head size 17 is not supported.
(EngineCore pid=5) ERROR 11-30 04:00:01 [core.py:9] Exception: WorkerProc initialization failed due to an exception.
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.
"""


def test_hits_are_summed_over_engine_cores_and_nothing_else() -> None:
    assert PrefixHits.parse(METRICS) == PrefixHits(local=384, external=1007)


def test_an_instance_without_a_connector_has_no_external_hits() -> None:
    assert PrefixHits.parse("") == PrefixHits(0, 0)


def test_hits_since_an_earlier_reading() -> None:
    assert PrefixHits(5, 9).since(PrefixHits(2, 3)) == PrefixHits(3, 6)


def test_a_transfer_is_read_from_its_line(tmp_path: Path) -> None:
    (log := tmp_path / "log").write_text(LINE)
    [transfer] = read_transfers(log)
    assert transfer.used
    assert transfer.bytes == 4096
    assert str(transfer.consumer) == "dp1 pp0 tp1"
    assert str(transfer.reads[0].producer) == "dp? pp1 tp0"


def test_a_line_that_is_still_being_written_is_left_for_later(tmp_path: Path) -> None:
    (log := tmp_path / "log").write_text(LINE + LINE[:20])
    assert len(read_transfers(log)) == 1


def test_no_log_means_no_transfers(tmp_path: Path) -> None:
    assert read_transfers(tmp_path / "none") == []


def test_waiting_for_transfers_ends_at_the_deadline(tmp_path: Path) -> None:
    (log := tmp_path / "log").write_text(LINE)
    moved = await_transfers(log, lambda transfer: "cmpl-a" in transfer.request, count=2, deadline_s=0.05)
    assert moved.bytes == 4096
    assert moved.ms == 1.5


def test_the_cause_is_the_failure_that_the_others_are_consequences_of(tmp_path: Path) -> None:
    (log := tmp_path / "log").write_text(ENGINE_LOG)
    assert logs.likely_cause(log) == "ValueError: Head size 17 is not supported."


@pytest.mark.parametrize("text", ["", "all is well\n"])
def test_a_log_without_an_exception_has_no_cause(tmp_path: Path, text: str) -> None:
    (log := tmp_path / "log").write_text(text)
    assert logs.likely_cause(log) is None


def test_the_tail_of_a_log_is_free_of_colours_and_empty_lines(tmp_path: Path) -> None:
    (log := tmp_path / "log").write_text("one\n\n\x1b[36mtwo\x1b[0m\n\n")
    assert logs.tail(log, 5) == ["one", "two"]
    assert logs.tail(tmp_path / "none", 5) == []
