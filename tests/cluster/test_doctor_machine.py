"""Limits, ports, hosts and wiring: what is well, and each way in which it is not."""

import resource
import socket
from pathlib import Path

import pytest

from kvferry.cluster.doctor import machine
from kvferry.cluster.doctor.findings import Finding, Level

GB = 1 << 30
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tNV18\tPIX\tSYS\t0-51\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tNV18\tNODE\tSYS\t0-51\t0\t\tN/A\n"
    "GPU2\tNV18\tNV18\t X \tSYS\tPHB\t52-103\t1\t\tN/A\n"
    "NIC0\tPIX\tNODE\tSYS\t X \tSYS\t\t\t\t\n"
    "NIC1\tSYS\tSYS\tPHB\tSYS\t X \t\t\t\t\n"
    "\n"
    "Legend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect\n\n"
    "NIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n\n"
)
ONE_GPU = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-15\t0\t\tN/A\n\nLegend:\n\n  X    = Self\n"


def _is(finding: Finding, level: Level, said: str) -> bool:
    assert finding.level is level, finding
    assert bool(finding.fix) == (level is not Level.OK)
    return said in f"{finding.text} {finding.fix}"


def test_locked_memory_matters_where_there_is_rdma() -> None:
    assert _is(machine.locked_memory(resource.RLIM_INFINITY, True), Level.OK, "no limit")
    assert _is(machine.locked_memory(8 << 20, False), Level.OK, "8.39 MB")
    assert _is(machine.locked_memory(8 << 20, True), Level.PROBLEM, "ulimit -l unlimited")


def test_rdma_devices_are_those_of_the_system(tmp_path: Path) -> None:
    assert machine.rdma_devices(tmp_path / "none") == []
    (tmp_path / "mlx5_1").mkdir()
    (tmp_path / "mlx5_0").mkdir()
    assert machine.rdma_devices(tmp_path) == ["mlx5_0", "mlx5_1"]


@pytest.mark.parametrize(
    ("total", "free", "level", "said"),
    [
        (64 * GB, 60 * GB, Level.OK, "64.4 GB of 68.7 GB free"),
        (64 * GB, GB, Level.WARNING, "remove what is left over"),
        (64 << 20, 64 << 20, Level.PROBLEM, "--shm-size"),
    ],
)
def test_shared_memory_must_have_room(total: int, free: int, level: Level, said: str) -> None:
    assert _is(machine.shared_memory(total, free), level, said)


def test_a_usual_port_that_is_taken_is_named() -> None:
    assert _is(machine.ports({}, (32768, 60999)), Level.OK, "8000, 8080 are free")
    assert _is(machine.ports({8000: "vllm serve"}, (1, 2)), Level.WARNING, "8000 (vllm serve)")


def test_a_listener_is_found_on_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setattr(machine, "USUAL_PORTS", {port: "something"})
        assert _is(machine.this_ports(), Level.WARNING, f"{port} (something)")


@pytest.mark.parametrize(
    ("chosen", "route", "own", "secret", "level", "said"),
    [
        ("", "10.0.0.7", True, False, Level.OK, "10.0.0.7, from the default route"),
        ("10.0.0.8", None, True, False, Level.OK, "10.0.0.8, from VLLM_HOST_IP"),
        ("10.9.9.9", None, False, False, Level.PROBLEM, "no address of this machine"),
        ("127.0.0.1", None, True, True, Level.WARNING, "other hosts cannot reach it"),
        ("localhost", None, True, True, Level.WARNING, "other hosts cannot reach it"),
        ("", None, True, False, Level.WARNING, "no default route"),
        ("", "8.8.4.4", True, False, Level.WARNING, "set KVFERRY_SECRET"),
        ("", "8.8.4.4", True, True, Level.OK, "8.8.4.4"),
    ],
)
def test_the_advertised_host_must_be_reachable(
    chosen: str, route: str | None, own: bool, secret: bool, level: Level, said: str
) -> None:
    assert _is(machine.advertised_host(chosen, route, own, secret), level, said)


def test_an_address_of_somebody_else_is_no_own_one() -> None:
    assert machine.is_own("127.0.0.1")
    assert machine.is_own("localhost")
    assert not machine.is_own("198.51.100.9")
    assert not machine.is_own("no such host")
    assert _is(machine.this_advertised_host({"VLLM_HOST_IP": "198.51.100.9"}), Level.PROBLEM, "198.51.100.9")


def test_each_gpu_has_its_nearest_nic() -> None:
    nearest = {"GPU0": ("mlx5_0", "PIX"), "GPU1": ("mlx5_0", "NODE"), "GPU2": ("mlx5_1", "PHB")}
    assert machine.nearest_nics(TOPOLOGY) == nearest
    assert machine.nearest_nics(ONE_GPU) == {"GPU0": None}
    assert machine.nearest_nics("") == machine.nearest_nics("no table\nat all") == {}


def test_a_gpu_far_from_its_nic_is_a_warning() -> None:
    far, near = machine.affinity(TOPOLOGY)
    assert _is(far, Level.WARNING, "GPU1-mlx5_0 NODE")
    assert _is(near, Level.OK, "GPU0-mlx5_0 PIX, GPU2-mlx5_1 PHB")


def test_a_machine_without_gpu_or_nic_is_said_to_be_one() -> None:
    assert _is(machine.affinity(None)[0], Level.OK, "no GPU")
    assert _is(machine.affinity(ONE_GPU)[0], Level.WARNING, "GPU0: no RDMA NIC")
    assert _is(machine.affinity("junk")[0], Level.WARNING, "by hand")
