"""What is read of an instance, and when a rank is left alone."""

import pytest

from kvferry.gateway.health import LONGEST_PAUSE_S, Breaker, Fleet, Report
from kvferry.gateway.settings import InstanceSpec, Role, Settings

METRICS = b"""# HELP vllm:kv_cache_usage_perc KV-cache usage.
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:num_requests_running{engine="1",model_name="m"} 3.0
vllm:cache_config_info{block_size="16",engine="0",kv_cache_size_tokens="1600",num_gpu_blocks="200"} 1.0
vllm:cache_config_info{block_size="16",engine="1",kv_cache_size_tokens="1600",num_gpu_blocks="200"} 1.0
kvferry:layout_info{engine="0",fingerprint="abc"} 1.0
process_start_time_seconds 1.7e+09
"""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _fleet(*roles: Role, **changes) -> tuple[Fleet, Clock]:
    clock = Clock()
    specs = tuple(InstanceSpec(f"http://h:{port}", role) for port, role in enumerate(roles, 1))
    return Fleet(Settings(instances=specs, **changes), clock), clock


def test_metrics_tell_ranks_usage_capacity_start_and_fingerprint():
    assert Report.parse(METRICS) == Report((0.25, 0.5), 1600, b"1.7e+09", b"abc")


def test_ranks_of_a_node_are_counted_from_zero():
    text = b'vllm:kv_cache_usage_perc{engine="6"} 0.1\nvllm:kv_cache_usage_perc{engine="7"} 0.2\n'
    assert Report.parse(text).usage == (0.1, 0.2)


def test_a_size_in_blocks_alone_is_no_capacity():
    """They are those of all data parallel ranks, and of one context parallel rank; the size itself may be None yet."""
    for tokens in ("", 'kv_cache_size_tokens="None",'):
        text = f'vllm:cache_config_info{{block_size="16",engine="0",{tokens}num_gpu_blocks="100"}} 1.0\n'
        assert Report.parse(text.encode()).capacity is None


def test_an_instance_that_says_nothing_of_itself_has_one_rank():
    assert Report.parse(b"") == Report()
    fleet, _ = _fleet(Role.DECODE)
    (instance,) = fleet.instances.values()
    instance.reached(Report())
    assert [rank.header for rank in fleet.usable(Role.DECODE)] == [None]


def test_every_rank_is_addressed_explicitly():
    fleet, _ = _fleet(Role.DECODE)
    (instance,) = fleet.instances.values()
    instance.reached(Report.parse(METRICS))
    assert [(rank.header, rank.usage) for rank in fleet.usable(Role.DECODE)] == [("0", 0.25), ("1", 0.5)]


def test_a_given_number_of_ranks_wins_over_what_metrics_say():
    fleet, _ = _fleet()
    instance = fleet.add(InstanceSpec("http://h:9", Role.DECODE, 4))
    instance.reached(Report.parse(METRICS))
    assert len(instance.ranks) == 4


def test_an_instance_is_used_only_while_it_is_well():
    fleet, _ = _fleet(Role.DECODE)
    (instance,) = fleet.instances.values()
    assert not fleet.usable(Role.DECODE)
    instance.reached(Report())
    assert fleet.usable(Role.DECODE)
    instance.missed()
    assert not fleet.usable(Role.DECODE)


def test_a_slow_health_check_is_not_a_lost_instance():
    fleet, _ = _fleet(Role.DECODE)
    (instance,) = fleet.instances.values()
    instance.reached(Report())
    instance.missed(3)
    instance.missed(3)
    assert instance.up
    instance.missed(3)
    assert not instance.up


def test_an_instance_that_answers_requests_is_not_lost_for_slow_probes():
    fleet, _ = _fleet(Role.DECODE)
    (instance,) = fleet.instances.values()
    instance.reached(Report())
    for _ in range(9):
        instance.missed(2)
        instance.answered()
    assert instance.up


def test_a_breaker_opens_after_failures_in_a_row_and_lets_one_trial_through():
    clock = Clock()
    breaker = Breaker(2, 1.0, clock)
    breaker.failed()
    assert breaker.allows()
    breaker.failed()
    assert not breaker.allows()
    clock.now = 1.0
    assert breaker.allows()
    breaker.trying()
    assert not breaker.allows()
    breaker.reset()
    assert breaker.allows()


def test_a_breaker_waits_longer_each_time_up_to_a_limit():
    clock = Clock()
    breaker = Breaker(1, 1.0, clock)
    pauses = []
    for _ in range(8):
        breaker.failed()
        start = clock.now
        while not breaker.allows():
            clock.now += 0.5
        pauses.append(clock.now - start)
    assert pauses == [1, 2, 4, 8, 16, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]


def test_a_breaker_guards_one_rank_and_not_its_neighbour():
    fleet, _ = _fleet(Role.DECODE, breaker_failures=1)
    (instance,) = fleet.instances.values()
    instance.reached(Report.parse(METRICS))
    instance.ranks[0].breaker.failed()
    assert [rank.index for rank in fleet.usable(Role.DECODE)] == [1]


def test_a_new_incarnation_starts_with_a_closed_breaker():
    fleet, _ = _fleet(Role.DECODE, breaker_failures=1)
    (instance,) = fleet.instances.values()
    instance.reached(Report(incarnation=b"1"))
    instance.ranks[0].breaker.failed()
    instance.reached(Report(incarnation=b"1"))
    assert not fleet.usable(Role.DECODE)
    instance.reached(Report(incarnation=b"2"))
    assert fleet.usable(Role.DECODE)


def test_only_compatible_pairs_are_matched():
    fleet, _ = _fleet(Role.PREFILL, Role.PREFILL, Role.DECODE)
    one, other, decode = fleet.instances.values()
    one.reached(Report(fingerprint=b"a"))
    other.reached(Report(fingerprint=b"b"))
    decode.reached(Report(fingerprint=b"b"))
    assert [rank.instance for rank in fleet.usable(Role.PREFILL)] == [other]


def test_an_instance_without_a_fingerprint_is_matched_with_any():
    """The connector refuses what does not fit; the gateway only saves the attempt."""
    fleet, _ = _fleet(Role.PREFILL, Role.DECODE)
    prefill, decode = fleet.instances.values()
    prefill.reached(Report(fingerprint=b"a"))
    decode.reached(Report())
    assert fleet.usable(Role.PREFILL)


def test_load_is_outstanding_tokens_for_prefill_and_occupancy_for_decode():
    fleet, _ = _fleet(Role.PREFILL, Role.DECODE)
    for instance in fleet.instances.values():
        instance.reached(Report(capacity=1000, usage=(0.3,)))
    prefill, decode = (instance.ranks[0] for instance in fleet.instances.values())
    with prefill.working(500), decode.working(100):
        assert (prefill.load, decode.load) == (500, 0.3)
        with decode.working(300):
            assert decode.load == 0.4
    assert (prefill.load, decode.load, prefill.requests) == (0, 0.3, 0)


@pytest.mark.parametrize(
    ("text", "url", "dp"),
    [
        ("http://h:1", "http://h:1", None),
        ("http://h:1/", "http://h:1", None),
        ("https://[::1]:8000,dp=16", "https://[::1]:8000", 16),
        ("http://name", "http://name", None),
    ],
)
def test_an_instance_is_read_from_its_url(text, url, dp):
    assert InstanceSpec.parse(text, Role.DECODE) == InstanceSpec(url, Role.DECODE, dp)
