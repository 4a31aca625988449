"""What processes say of themselves, between two moments."""

import pytest

from kvferry.bench.serve.meters import between, by_instance, grown, parse, read

BEFORE = """
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{engine="0",le="+Inf"} 2
vllm:request_queue_time_seconds_sum{engine="0"} 1.0
vllm:request_queue_time_seconds_count{engine="0"} 2
vllm:request_queue_time_seconds_bucket{engine="1",le="+Inf"} 1
vllm:request_queue_time_seconds_sum{engine="1"} 0.5
vllm:request_queue_time_seconds_count{engine="1"} 1
# TYPE kvferry:phase_seconds histogram
kvferry:phase_seconds_sum{engine="0",phase="claim"} 1.0
kvferry:phase_seconds_count{engine="0",phase="claim"} 4
# TYPE vllm:external_prefix_cache_hits_total counter
vllm:external_prefix_cache_hits_total{engine="0"} 100
# TYPE vllm:other_seconds histogram
vllm:other_seconds_sum 5
vllm:other_seconds_count 5
"""


def test_means_are_of_what_came_between() -> None:
    after = BEFORE.replace('_sum{engine="1"} 0.5', '_sum{engine="1"} 1.5').replace(
        '_count{engine="1"} 1', '_count{engine="1"} 3'
    )
    legs, moved = between(parse(BEFORE), parse(after.replace("} 100", "} 130")))
    assert {leg: (mean.count, mean.seconds) for leg, mean in legs.items()} == {"queue": (2, 0.5)}
    assert moved == 30


def test_what_was_not_there_before_began_with_nothing() -> None:
    legs, moved = between(parse(""), parse(BEFORE))
    assert legs["queue"].count == 3
    assert legs["queue"].seconds == pytest.approx(0.5)
    assert legs["claim"].seconds == pytest.approx(0.25)
    assert set(legs) == {"queue", "claim"}
    assert moved == 100


def test_nothing_is_said_to_have_moved_where_a_process_has_died() -> None:
    assert between(parse(BEFORE), read({"decode": "http://127.0.0.1:9"})) == ({}, None)


def test_processes_of_an_engine_are_added_up() -> None:
    spent = grown({"decode": 1.0, "gone": 5.0}, {"decode": 2.0, "decode EngineCore": 3.0, "client": 1.0})
    assert by_instance(spent) == {"decode": 4.0, "client": 1.0}
