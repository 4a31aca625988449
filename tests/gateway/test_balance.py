"""Balancing: who gets a request, and that it pays against taking turns."""

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from kvferry.gateway.balance import BOUND, Balancer, SeenPrompts, affine
from kvferry.gateway.settings import Policy


@dataclass
class Target:
    name: str
    load: float = 0.0


def _targets(count: int) -> list[Target]:
    return [Target(f"http://10.0.0.{number}:8000@0") for number in range(count)]


def _keys(count: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in range(count)]


@pytest.mark.parametrize("policy", list(Policy))
def test_a_single_target_gets_everything(policy):
    (only,) = _targets(1)
    only.load = 1e9
    assert Balancer(policy).choose([only], b"k", 10) is only


def test_the_least_loaded_target_is_chosen():
    targets = _targets(3)
    targets[0].load, targets[1].load, targets[2].load = 5, 1, 3
    balancer = Balancer(Policy.LEAST_LOAD)
    assert {balancer.choose(targets, b"", 1).name for _ in range(9)} == {targets[1].name}


def test_equally_loaded_targets_take_turns():
    targets, balancer = _targets(3), Balancer(Policy.LEAST_LOAD)
    assert Counter(balancer.choose(targets, b"", 1).name for _ in range(9)) == {one.name: 3 for one in targets}


def test_one_beginning_meets_one_target():
    targets = _targets(5)
    for key in _keys(50):
        assert len({affine(random.sample(targets, 5), key, 1).name for _ in range(5)}) == 1


def test_beginnings_are_spread_over_the_targets():
    chosen = Counter(affine(_targets(4), key, 1).name for key in _keys(2000))
    assert len(chosen) == 4
    assert min(chosen.values()) > 400


def test_a_target_that_goes_moves_only_its_own_beginnings():
    targets = _targets(5)
    before = {key: affine(targets, key, 1).name for key in _keys(500)}
    left = targets[1:]
    for key, name in before.items():
        if name != targets[0].name:
            assert affine(left, key, 1).name == name


def test_affinity_yields_to_load():
    """However popular one beginning is, nobody carries more than the bound and one request."""
    targets, key = _targets(4), b"popular".ljust(16)
    for _ in range(1000):
        affine(targets, key, 1.0).load += 1.0
    assert max(one.load for one in targets) <= BOUND * 1000 / 4 + 1


def _slowest(policy: Policy, seed: int) -> float:
    """Prompts of heavy-tailed lengths come at 85 % of what four targets can do; the 99th percentile of the waits."""
    draw, targets, balancer = random.Random(seed), _targets(4), Balancer(policy)
    now, waits = 0.0, []
    free_at = {one.name: 0.0 for one in targets}
    for _ in range(4000):
        tokens = min(30_000.0, 200 * draw.paretovariate(1.2))
        now += draw.expovariate(0.85 * 4 / 1_000)
        for one in targets:
            one.load = max(0.0, free_at[one.name] - now)
        chosen = balancer.choose(targets, draw.randbytes(16), tokens)
        waits.append(max(0.0, free_at[chosen.name] - now))
        free_at[chosen.name] = max(now, free_at[chosen.name]) + tokens
    return sorted(waits)[int(0.99 * len(waits))]


@pytest.mark.parametrize("seed", range(3))
def test_least_load_beats_round_robin_on_a_skewed_workload(seed):
    least, robin = _slowest(Policy.LEAST_LOAD, seed), _slowest(Policy.ROUND_ROBIN, seed)
    assert least < 0.75 * robin, (least, robin)


def _hits(policy: Policy) -> float:
    """Sixty conversations over four targets whose caches hold twenty each: the part of turns that find their prefix."""
    draw, targets, balancer = random.Random(1), _targets(4), Balancer(policy)
    caches = {one.name: [] for one in targets}
    hits = 0
    for _ in range(3000):
        key = draw.randrange(60).to_bytes(16, "big")
        cache = caches[balancer.choose(targets, key, 1.0).name]
        hits += key in cache
        if key in cache:
            cache.remove(key)
        cache.append(key)
        del cache[:-20]
    return hits / 3000


def test_affinity_finds_more_prefixes_than_round_robin():
    assert _hits(Policy.AFFINITY) > _hits(Policy.ROUND_ROBIN) + 0.3


def test_seen_prompts_know_the_common_beginning_only_and_only_where_it_was_seen():
    seen = SeenPrompts()
    prompt = bytes(range(256)) * 8
    seen.add("a", prompt)
    assert seen.fraction("a", prompt) == 1.0
    assert seen.fraction("a", prompt[:1024] + b"x" * 1024) == 0.5
    assert seen.fraction("a", b"x" + prompt) == 0.0
    assert seen.fraction("b", prompt) == 0.0


def test_seen_prompts_forget_the_oldest():
    seen = SeenPrompts(size=2)
    for letter in b"abc":
        seen.add("t", bytes([letter]) * 512)
    assert [seen.fraction("t", bytes([letter]) * 512) for letter in b"abc"] == [0.0, 1.0, 1.0]
