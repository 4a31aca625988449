"""The existing vllm-router serves a prefill and a decode instance without knowing anything of KVFerry."""

from collections.abc import Iterator

import pytest

from kvferry.cluster.chat import ask
from kvferry.cluster.launch import start_router
from kvferry.cluster.ports import free_ports
from kvferry.cluster.supervisor import Supervisor
from kvferry.cluster.transfers import await_transfers, read_transfers

from .conftest import Fleet, Instance

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

QUESTIONS = [f"What is the capital of the country with number {number}? " * 6 for number in range(4)]


@pytest.fixture
def pair(fleet: Fleet) -> tuple[Instance, Instance]:
    return fleet.pair("qwen2", "pp=2", "dp=2")


@pytest.fixture
def router(pair: tuple[Instance, Instance], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    producer, consumer = pair
    with Supervisor(tmp_path_factory.mktemp("router")) as supervisor:
        port, metrics_port = free_ports(2)
        yield start_router(supervisor, producer.spec, consumer.spec, (port, metrics_port), lambda *_: None)


def test_streamed_chats_through_the_router_equal_those_of_a_plain_engine(
    fleet: Fleet, pair: tuple[Instance, Instance], router: str
) -> None:
    log = pair[1].transfer_log
    plain = fleet.plain("qwen2").url
    earlier = len(read_transfers(log))
    for question in QUESTIONS:
        assert ask(router, question, max_tokens=8) == ask(plain, question, max_tokens=8)
    moved = await_transfers(log, lambda _: True, earlier + len(QUESTIONS), deadline_s=5.0).transfers[earlier:]
    assert len(moved) == len(QUESTIONS)
    assert all(transfer.used for transfer in moved)
    assert {transfer.consumer.dp for transfer in moved} == {0, 1}
