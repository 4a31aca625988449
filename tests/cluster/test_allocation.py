"""Devices, ports and settings of every instance of a cluster; what cannot be given out is refused."""

import socket
from pathlib import Path
from typing import Any

import pytest

from kvferry.cluster.allocation import Allocator, Member, Need, engine_settings, share_devices
from kvferry.cluster.commands import engine_command, engine_environment
from kvferry.cluster.flags import from_mapping
from kvferry.cluster.machine import Machine
from kvferry.cluster.manifest import Role, parse
from kvferry.cluster.ports import PortChooser
from kvferry.errors import PortInUseError, SpecError

from .configs import GROUPED_QUERY

EIGHT_GPUS = Machine(False, tuple(map(str, range(8))))
FOUR_CORES = Machine(True, tuple(map(str, range(4))))
SECRET = Path("/state/secret")


def _allocator(machine: Machine = EIGHT_GPUS, elsewhere: frozenset[str] = frozenset(), **manifest: Any) -> Allocator:
    made = parse({"model": "/models/m", **manifest})
    return Allocator(made, machine, Path("/models/m"), GROUPED_QUERY, SECRET, elsewhere=elsewhere)


def _devices(members: list[Member]) -> list[tuple[str, ...]]:
    return [member.devices for member in members]


def test_every_worker_gets_a_gpu_of_its_own() -> None:
    allocator = _allocator(prefill={"layout": "tp=2", "replicas": 2}, decode={"layout": "dp=2,tp=2"})
    members = allocator.all_members()
    assert [member.name for member in members] == ["prefill-0", "prefill-1", "decode-0"]
    assert _devices(members) == [("0", "1"), ("2", "3"), ("4", "5", "6", "7")]
    assert members[2].spec.environment == {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}


def test_ranks_of_prefill_context_parallelism_need_gpus_and_those_of_decode_need_none() -> None:
    gpus = Machine(False, tuple(map(str, range(26))))
    members = _allocator(gpus, prefill={"layout": "pcp=2"}, decode={"layout": {"tp": 24, "dcp": 2}}).all_members()
    assert [len(devices) for devices in _devices(members)] == [2, 24]


@pytest.mark.parametrize("layout", ["tp=24,dcp=2", "pcp=2"])
def test_context_parallelism_is_refused_on_processors(layout: str) -> None:
    with pytest.raises(SpecError, match="CPU build runs no context parallelism"):
        _allocator(FOUR_CORES, decode={"layout": layout}).all_members()


def test_too_few_gpus_are_refused_with_what_is_needed() -> None:
    with pytest.raises(SpecError) as caught:
        _allocator(prefill={"layout": "tp=4,pp=2"}, decode={"layout": "dp=2"}).all_members()
    assert str(caught.value).startswith("10 GPUs are needed (prefill-0 8, decode-0 2), but 8 of 8 are free")


def test_gpus_of_other_clusters_are_left_alone() -> None:
    allocator = _allocator(elsewhere=frozenset({"0", "2"}))
    assert _devices(allocator.all_members()) == [("1",), ("3",)]


def test_only_the_named_devices_are_used() -> None:
    assert _devices(_allocator(devices=[5, "3"]).all_members()) == [("5",), ("3",)]
    with pytest.raises(SpecError, match="8 are not among the GPUs 0, 1"):
        _allocator(devices=[8]).all_members()


def test_an_instance_may_name_its_devices() -> None:
    members = _allocator(instances={"decode-0": {"devices": [0]}}).all_members()
    assert _devices(members) == [("1",), ("0",)]


@pytest.mark.parametrize(
    ("instances", "said"),
    [
        ({"decode-0": {"devices": [0, 1]}}, "instances.decode-0.devices: 2 GPUs for 1 workers"),
        ({"decode-0": {"devices": [9]}}, "9 are not among the GPUs"),
        ({"decode-0": {"devices": [0]}, "prefill-0": {"devices": [0]}}, "given to several instances"),
    ],
)
def test_devices_that_cannot_be_are_refused(instances: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as caught:
        _allocator(instances=instances).all_members()
    assert said in str(caught.value)


def test_cores_are_dealt_out_where_there_are_more_than_workers() -> None:
    members = _allocator(Machine(True, tuple(map(str, range(9)))), decode={"layout": "dp=2"}).all_members()
    assert _devices(members) == [("0", "1", "2"), ("3", "4", "5", "6", "7", "8")]
    environment = engine_environment(members[1].spec, {})
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "3,4,5|6,7,8"
    assert environment["OMP_NUM_THREADS"] == "3"


def test_cores_are_shared_where_there_are_not() -> None:
    members = _allocator(FOUR_CORES, prefill={"layout": "tp=2,pp=2"}).all_members()
    assert _devices(members) == [(), ()]
    assert engine_environment(members[0].spec, {})["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_further_members_get_what_is_left() -> None:
    allocator = _allocator(prefill={"layout": "tp=4"}, decode={"layout": "tp=2"})
    running = allocator.all_members()
    [more] = allocator.members([(Role.DECODE, 1)], running)
    assert more.devices == ("6", "7")
    with pytest.raises(SpecError, match="0 of 8 are free"):
        allocator.members([(Role.DECODE, 2)], [*running, more])


def test_a_further_member_shares_cores_where_others_do() -> None:
    allocator = _allocator(FOUR_CORES, prefill={"layout": "tp=2,pp=2"})
    [more] = allocator.members([(Role.DECODE, 1)], allocator.all_members())
    assert more.devices == ()


def test_sharing_is_refused_to_nobody_on_cores() -> None:
    shares = share_devices([Need("a", 100)], FOUR_CORES, None, {"0", "1"})
    assert shares == {"a": ()}


def test_ports_and_side_channels_are_all_different() -> None:
    allocator = _allocator(FOUR_CORES, decode={"layout": "dp=4", "replicas": 2})
    members = allocator.all_members()
    ports = [port for member in members for port in member.ports] + [allocator.front().port]
    assert len(set(ports)) == len(ports) == 2 + 5 + 5 + 1


def test_ports_promised_to_others_are_not_chosen_again() -> None:
    chooser = PortChooser()
    first = chooser.run(50)
    with pytest.raises(PortInUseError, match="belongs to another instance or cluster"):
        chooser.require(first + 20)
    assert PortChooser({8123}).prefer(8123) != 8123


def test_the_usual_port_is_left_for_another_where_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr("kvferry.cluster.allocation.USUAL_PORT", taken)
        assert _allocator().front().port != taken
        with pytest.raises(PortInUseError, match=f"port {taken} on 127.0.0.1 cannot be used"):
            _allocator(port=taken).front()
        with pytest.raises(PortInUseError):
            _allocator(instances={"decode-0": {"side_channel_port": taken}}).all_members()


def test_a_layout_that_does_not_fit_the_model_is_refused() -> None:
    with pytest.raises(SpecError, match="decode: tp=5,pp=1,dp=1 does not fit the model: 24 attention heads"):
        _allocator(decode={"layout": "tp=5"}).all_members()


def test_the_connector_gets_the_secret_an_address_and_what_the_manifest_says() -> None:
    members = _allocator(
        connector={"read_timeout": 5}, instances={"decode-0": {"side_channel_port": 7123}}
    ).all_members()
    prefill, decode = (member.spec for member in members)
    assert decode.connector_config == {
        "side_channel_host": "127.0.0.1",
        "side_channel_port": 7123,
        "secret_file": "/state/secret",
        "read_timeout": 5,
    }
    assert (prefill.role, decode.role) == ("kv_producer", "kv_consumer")
    assert prefill.kv_load_failure_policy == "recompute"


def test_instances_that_listen_everywhere_are_reached_on_the_loopback_interface() -> None:
    [prefill, _] = _allocator(instance_host="0.0.0.0").all_members()
    assert prefill.spec.url.startswith("http://127.0.0.1:")
    assert "side_channel_host" not in prefill.spec.connector_config
    assert engine_command(prefill.spec, cpu=False)[engine_command(prefill.spec).index("--host") + 1] == "0.0.0.0"


def test_a_gpu_engine_gets_vllms_own_defaults_and_the_flags_as_they_are() -> None:
    [prefill, _] = _allocator(
        vllm={"max-model-len": 32768, "new-flag": "x"}, prefill={"layout": "tp=2,pp=2"}, served_model_name="llama"
    ).all_members()
    command = engine_command(prefill.spec, cpu=False)
    assert command[1:13] == [
        *("-m", "vllm.entrypoints.openai.api_server", "--model", "/models/m", "--served-model-name", "llama"),
        *("--host", "127.0.0.1", "--port", str(prefill.spec.port), "--tensor-parallel-size", "2"),
    ]
    assert command[-4:] == ["--max-model-len", "32768", "--new-flag", "x"]
    assert not {"--dtype", "--max-num-seqs", "--enforce-eager", "--kv-cache-memory-bytes"} & set(command)


def test_an_engine_on_cpu_reserves_little_unless_flags_say_otherwise() -> None:
    settings = engine_settings({}, {**GROUPED_QUERY, "dtype": "float32"}, cpu=True)
    assert settings == {
        "dtype": "float32",
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "kv_cache_bytes": 64 << 20,
        "extra": (),
    }
    flags = from_mapping({"max-model-len": 500000, "max-num-seqs": 2, "dtype": "bfloat16"}, "")
    settings = engine_settings(flags, GROUPED_QUERY, cpu=True)
    assert settings["max_model_len"] is settings["max_num_seqs"] is settings["dtype"] is None
    assert settings["kv_cache_bytes"] > 64 << 20
    assert settings["extra"] == ("--max-model-len", "500000", "--max-num-seqs", "2", "--dtype", "bfloat16")


def test_float32_is_said_once() -> None:
    settings = engine_settings(from_mapping({"dtype": "float"}, ""), GROUPED_QUERY, cpu=True)
    assert (settings["dtype"], settings["extra"]) == ("float32", ())
