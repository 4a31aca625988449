"""The control socket: one line of JSON each way, wherever the state directory lies and whatever is sent."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.cluster import control
from kvferry.cluster.control import ControlServer, Request, asked
from kvferry.cluster.state import StateDirectory
from kvferry.errors import ClusterError, KVFerryError, StartError

DEADLINE_S = 20.0


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDirectory]:
    """So deep that its name does not fit into a socket's address."""
    state = StateDirectory("default", tmp_path / ("deep" * 30))
    state.acquire()
    yield state
    state.release()


def _answer(request: Request) -> Any:
    if request.do == "scale":
        raise ClusterError("not now")
    if request.do == "down":
        raise StartError("it died")
    return {"asked": request.do}


def test_a_question_is_answered_and_the_end_is_seen(state: StateDirectory) -> None:
    with ControlServer(state, _answer), asked(state, Request("status"), DEADLINE_S) as (result, end):
        assert result == {"asked": "status"}
        assert not end.wait(0.05)


@pytest.mark.parametrize(("do", "kind"), [("scale", ClusterError), ("down", KVFerryError)])
def test_a_refusal_comes_as_the_exception_that_it_was(state: StateDirectory, do: str, kind: type) -> None:
    with ControlServer(state, _answer), pytest.raises(KVFerryError) as caught, asked(state, Request(do), DEADLINE_S):
        pass
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    "line", [b"junk\n", b'{"do": 5}\n', b'{"do": "status", "more": 1}\n', b"[" * 2_000_000 + b"\n"]
)
def test_what_is_no_request_is_refused_and_the_next_one_answered(
    state: StateDirectory, line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ControlServer(state, _answer):
        with socket.socket(socket.AF_UNIX) as connection, control._short_path(state.path) as directory:
            connection.settimeout(DEADLINE_S)
            connection.connect(f"{directory}/control.sock")
            connection.sendall(line[: control.MOST_BYTES + 1])
            reply = msgspec.json.decode(control._line(connection), type=control.Reply)
            assert "not a request" in (reply.error or "")
        with asked(state, Request("status"), DEADLINE_S) as (result, _):
            assert result == {"asked": "status"}


def test_a_cluster_that_does_not_listen_yet_is_a_clear_error(state: StateDirectory) -> None:
    with (
        pytest.raises(ClusterError, match="the cluster named default does not answer"),
        asked(state, Request("status")),
    ):
        pass
