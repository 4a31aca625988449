"""What UCX says of itself, and which transport a transfer took: from recorded logs, and from real transfers."""

from pathlib import Path

import pytest

from kvferry.cluster.doctor import fabric
from kvferry.cluster.doctor.fabric import Used
from kvferry.cluster.doctor.findings import Level

STAMP = "[1796042594.083570] [vm:2456 :0]"
TABLE = f"""\
{STAMP}     ucp_context.c:2753 UCX  INFO  Version 1.23.0 (loaded from /lib/libucp.so.0)
{STAMP}   +------------+-----------+-----------+-----------------------+
{STAMP}   | Available Transports and Devices (ctx: c)                  |
{STAMP}   +------------+-----------+-----------+-----------------------+
{STAMP}   | Type       | Component | Transport | Device (System device)|
{STAMP}   +------------+-----------+-----------+-----------------------+
{STAMP}   | network    | tcp       | + tcp     | + eth0  + lo          |
{STAMP}   |            | ib        | + rc_mlx5 | + mlx5_0:1 - mlx5_1:1 |
{STAMP}   |            | ib        | - ud_mlx5 | - mlx5_0:1            |
{STAMP}   | intra-node | cma       | + cma     | + memory              |
{STAMP}   | Legend: + = enabled, - = disabled                          |
{STAMP}   | nothing    | after     | + that    | + counts              |
"""
USED = f"""\
{STAMP}   | c intra-node cfg#1                                               |
{STAMP}   | active message by ucp_am_send* from host memory                  |
{STAMP}   | Count | Range  | Description | Config                            |
{STAMP}   |    99 | 0..inf | short       | tcp/lo                            |
{STAMP}   +-------+--------+-------------+-----------------------------------+
{STAMP}   | remote memory read by ucp_get*(multi) into host memory from host |
{STAMP}   +-------+--------+-------------+-----------------------------------+
{STAMP}   | Count | Range  | Description |              Config               |
{STAMP}   +-------+--------+-------------+-----------------------------------+
{STAMP}   |     2 | 0..99  | copy-out    | tcp/lo                            |
{STAMP}   |    12 | 99..inf| zero-copy   | 52% on tcp/lo and 48% on tcp/eth0 |
{STAMP}   | active message by ucp_am_send*(multi) from host memory           |
{STAMP}   |    98 | 0..inf | short       | tcp/lo                            |
"""
SHARED = Used(2, "zero-copy", "cma/memory")


def test_enabled_transports_and_devices_are_read() -> None:
    assert fabric.available(TABLE) == {"tcp": ["eth0", "lo"], "rc_mlx5": ["mlx5_0:1"], "cma": ["memory"]}
    assert fabric.version(TABLE) == "1.23.0"


def test_only_what_reads_have_used_counts() -> None:
    """Not what messages went over, and the most used first."""
    taken = [Used(12, "zero-copy", "52% on tcp/lo and 48% on tcp/eth0"), Used(2, "copy-out", "tcp/lo")]
    assert fabric.used(TABLE + USED) == taken


@pytest.mark.parametrize("log", ["", "junk", "| | | |", "|" * 5000, TABLE[:300], USED[-100:]])
def test_a_log_that_says_nothing_gives_nothing(log: str) -> None:
    assert fabric.used(log) == []
    assert fabric.available(log) == {}


@pytest.mark.parametrize(
    ("names", "devices", "level", "said"),
    [
        (["tcp", "rc_mlx5"], ["mlx5_0"], Level.OK, "UCX 1.23.0: tcp, rc_mlx5"),
        (["tcp", "cma"], ["mlx5_0"], Level.PROBLEM, "mlx5_0 is there and UCX does not use it"),
        (["tcp", "cma"], [], Level.WARNING, "no RDMA"),
        (["cma"], [], Level.WARNING, "add tcp to UCX_TLS"),
        ([], [], Level.WARNING, "has not listed"),
    ],
)
def test_transports_that_lead_nowhere_are_told(names: list[str], devices: list[str], level: Level, said: str) -> None:
    finding = fabric.transports({name: [] for name in names}, "1.23.0", devices)
    assert finding.level is level
    assert said in f"{finding.text} {finding.fix}"


@pytest.mark.parametrize(
    ("taken", "level", "said"),
    [
        ([SHARED], Level.OK, "cma/memory (zero-copy)"),
        ([SHARED, Used(1, "copy", "tcp/lo")], Level.WARNING, "not over shared memory"),
        ([Used(1, "copy", "50% on tcp/lo and 50% on tcp/eth0")], Level.WARNING, "not over shared memory"),
        ([], Level.WARNING, "does not say"),
    ],
)
def test_tcp_within_one_machine_is_a_warning(taken: list[Used], level: Level, said: str) -> None:
    finding = fabric.transfer(taken)
    assert finding.level is level
    assert said in finding.text


def test_a_real_transfer_says_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told to use TCP alone, UCX says TCP both times."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    listed, taken = fabric.this_fabric()
    assert "tcp" in listed.text
    assert taken.level is Level.WARNING
    assert "tcp/" in taken.text


def test_a_transfer_that_fails_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "nonsense")
    found = fabric.this_fabric()[-1]
    assert found.level is Level.PROBLEM
    assert "cannot exchange bytes" in found.text
    assert found.fix


def test_logs_are_read_whatever_bytes_are_in_them(tmp_path: Path) -> None:
    (tmp_path / "ucx-1.log").write_bytes(b"\xff\xfe" + USED.encode())
    (tmp_path / "other").write_bytes(b"|")
    assert len(fabric.used(fabric.read_logs(tmp_path))) == 2
