"""Whatever goes wrong between engines, the rules of the protocol hold, and what goes wrong is met in every state."""

from collections import Counter

import pytest

from .scenario import Result, simulate
from .seeds import attempts

SEEDS = 2000

EXPECTED = {
    "grant:offered": {
        *("Claim Granted", "Claim Gone", "Ack Gone", "Renew Renewed", "Release Released"),
        *("lease ended", "kill"),
    },
    "grant:held": {
        *("Claim Granted", "Claim Gone", "Ack Held", "Ack Gone", "Renew Renewed", "Release Released"),
        *("lease ended", "kill"),
    },
    "grant:open": {"Claim Waiting", "Claim Granted", "Claim Gone", "preempt", "kill"},
    "grant:followed": {
        *("Claim Granted", "Claim Gone", "Follow Granted", "Ack Released", "Renew Renewed", "Release Released"),
        *("preempt", "kill"),
    },
    "grant:none": {"Claim Waiting", "Follow Gone", "Claim Gone", "Ack Gone", "Renew Renewed", "Release Released"},
    "grant:foreign": {"Claim Gone", "Follow Gone", "Ack Gone", "Renew Gone", "Release Released"},
    "load:expected": {"is too late", "abort", "kill"},
    "load:claiming": {"Claim Waiting", "Claim Granted", "Claim Gone", "Claim no answer", "abort", "kill"},
    "load:granted": {
        *("loads", "adds to local blocks", "is not needed", "is too late"),
        *("Renew Renewed", "Renew Gone", "Renew no answer", "abort", "kill"),
    },
    "load:loading": {"Renew Renewed", "Renew Gone", "Renew no answer", "abort", "kill", "lease ended"},
    "load:none": {"Claim Granted", "Claim no answer", "Renew Renewed", "Renew Gone", "abort"},
    "reader:meeting": {"Welcome", "Gone", "no answer", "abort", "kill"},
    "reader:reading": {"peer died", "partition", "reset", "overdue", "abort", "kill", "lease ended"},
    "reader:following": {"Granted", "Gone", "no answer", "abort", "kill"},
    "reader:acknowledging": {"Held", "Gone", "no answer", "abort", "kill"},
    "listener": {"gibberish"},
    "run:loaded": {"held", "failed"},
    "run:local": {"preempt"},
    "run:remote": {"preempt"},
}
"""What must have happened, by the state it happened in. ``foreign`` is a grant of an earlier or another incarnation."""


@pytest.mark.timeout(600)
def test_the_rules_hold_whatever_happens():
    total = Result(Counter(), Counter(), 0.0)
    with attempts(range(SEEDS), jobs=1) as results:
        for _, result in results:
            if isinstance(result, str):
                pytest.fail(result, pytrace=False)
            total += result
    missing = sorted({(state, event) for state, events in EXPECTED.items() for event in events} - set(total.coverage))
    assert not missing, "these events never met a party in that state"


def test_a_seed_replays_exactly():
    first, second = [], []
    assert simulate(7, first.append) == simulate(7, second.append)
    assert first == second
    assert len(first) > 10
