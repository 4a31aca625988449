"""What may be asked."""

import pytest

from kvferry.bench.transfer.question import Order, Pair, Question, Transport
from kvferry.cluster.blueprint import CacheShape
from kvferry.cluster.spec import Layout
from kvferry.errors import SpecError

SHAPE = CacheShape("attention", 4, 4, 64, "bfloat16")
PAIR = Pair(Layout(), Layout())


def _ask(**change):
    return Question(**{"shape": SHAPE, "pairs": (PAIR,), "tokens": (64,), **change})


def test_a_pair_is_two_layouts():
    pair = Pair.parse("tp=2,pp=2:tp=4")
    assert (pair.producer, pair.consumer) == (Layout(tp=2, pp=2), Layout(tp=4))
    assert pair.label == "tp2pp2 -> tp4"
    assert not pair.is_equal
    assert Pair.parse("tp=2:tp=2").is_equal


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp=2", "PRODUCER:CONSUMER"),
        ("tp=2:tp=2:tp=2", "PRODUCER:CONSUMER"),
        ("tp=0:tp=1", "tp=0"),
        ("tp=1:dp=2", "no dp"),
        ("tp=1:tp=65", "65 workers"),
    ],
)
def test_what_is_no_pair_is_refused(text, said):
    with pytest.raises(SpecError, match=said):
        Pair.parse(text)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": ()}, "between 1 and"),
        ({"tokens": (0,)}, "between 1 and"),
        ({"block_tokens": 0}, "between 1 and"),
        ({"pairs": (Pair.parse("pp=5:tp=1"),)}, "4 layers are too few"),
        ({"pairs": (Pair.parse("tp=1:pp=2,partition=2+3"),)}, "does not add up to 4 layers"),
        ({"tokens": (10_000_000,), "shape": CacheShape("attention", 80, 64, 4096, "float32")}, "GB of memory"),
    ],
)
def test_what_cannot_be_measured_is_refused(change, said):
    with pytest.raises(SpecError, match=said):
        _ask(**change)


def test_blocks_of_a_prompt_are_its_own_and_never_the_null_block():
    for order in Order:
        question = _ask(order=order, tokens=(1000, 33))
        ids = question.ids(1000, seed=1)
        assert len(set(ids)) == 63
        assert min(ids) >= 1
        assert max(ids) < question.engine(Layout()).workers[0].shards[0].num_blocks
        assert (ids == sorted(ids)) == (order is Order.CONTIGUOUS)
        assert len(question.ids(33, seed=1)) == 3


def test_scattered_blocks_are_the_same_in_every_process_and_differ_between_the_sides():
    question = _ask(tokens=(1000,))
    assert question.ids(1000, seed=1) == _ask(tokens=(1000,)).ids(1000, seed=1)
    assert question.ids(1000, seed=1) != question.ids(1000, seed=2)


def test_a_transport_is_told_to_ucx():
    """Messages go over TCP in any case, since only it tells NIXL that a peer has failed."""
    assert Transport.AUTO.variables == {}
    assert Transport.TCP.variables == {"UCX_TLS": "tcp,self"}
    assert Transport.SHM.variables == {"UCX_TLS": "shm,self,tcp"}
