"""The command lines and environments of engines and of the router."""

import json
import sys
from dataclasses import replace
from pathlib import Path

from kvferry.cluster.commands import (
    CPU_PATIENCE,
    engine_command,
    engine_environment,
    router_command,
    spreading_command,
)
from kvferry.cluster.spec import InstanceSpec, Layout

SPEC = InstanceSpec("prefill", Path("/models/m"), Layout(tp=2, pp=3, dp=2, partition=(1, 2, 1)), 8100, "kv_producer")


def _value(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_an_engine_gets_its_layout_in_vllms_own_flags() -> None:
    command = engine_command(SPEC)
    assert _value(command, "--tensor-parallel-size") == "2"
    assert _value(command, "--pipeline-parallel-size") == "3"
    assert _value(command, "--data-parallel-size") == "2"
    assert _value(command, "--port") == "8100"


def test_context_parallelism_is_in_vllms_own_flags_where_there_is_any() -> None:
    command = engine_command(replace(SPEC, layout=Layout(tp=8, pcp=2, dcp=16, interleave=32)), cpu=False)
    assert _value(command, "--prefill-context-parallel-size") == "2"
    assert _value(command, "--decode-context-parallel-size") == "16"
    assert _value(command, "--cp-kv-cache-interleave-size") == "32"
    assert not any("context" in part or "interleave" in part for part in engine_command(SPEC, cpu=False))


def test_the_connector_is_named_in_vllms_own_flag() -> None:
    config = json.loads(_value(engine_command(SPEC, cpu=False), "--kv-transfer-config"))
    assert config == {"kv_connector": "KVFerryConnector", "kv_role": "kv_producer"}


def test_options_of_the_connector_go_where_vllm_wants_them() -> None:
    spec = replace(SPEC, connector_config={"kv_lease_duration": 5})
    config = json.loads(_value(engine_command(spec, cpu=False), "--kv-transfer-config"))
    assert config["kv_connector_extra_config"] == {"kv_lease_duration": 5}


def test_engines_on_cpu_are_more_patient_unless_told_otherwise() -> None:
    spec = replace(SPEC, connector_config={"kv_lease_duration": 5})
    config = json.loads(_value(engine_command(spec), "--kv-transfer-config"))
    assert config["kv_connector_extra_config"] == {**CPU_PATIENCE, "kv_lease_duration": 5}


def test_the_policy_for_failed_loads_goes_where_vllm_wants_it() -> None:
    spec = replace(SPEC, kv_load_failure_policy="recompute")
    config = json.loads(_value(engine_command(spec), "--kv-transfer-config"))
    assert config["kv_load_failure_policy"] == "recompute"


def test_an_engine_with_cores_of_its_own_is_kept_on_them() -> None:
    command = engine_command(replace(SPEC, cores=(2, 3)))
    assert command[:4] == ["taskset", "--cpu-list", "2,3", sys.executable]
    assert command[3:] == engine_command(SPEC)


def test_a_plain_engine_has_no_connector() -> None:
    assert "--kv-transfer-config" not in engine_command(replace(SPEC, role=None))


def test_pipeline_stages_on_cpu_get_the_worker_that_survives_eager_mode() -> None:
    assert _value(engine_command(SPEC), "--worker-cls") == "kvferry.vllm.cpu_worker.PipelineCPUWorker"
    assert "--worker-cls" not in engine_command(replace(SPEC, layout=Layout(tp=2)))


def test_a_latent_cache_in_float32_is_kept_from_the_backend_that_refuses_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"kv_lora_rank": 512}')
    spec = replace(SPEC, model=tmp_path)
    assert _value(engine_command(spec), "--attention-backend") == "CPU_MLA"
    assert "--attention-backend" not in engine_command(replace(spec, dtype="bfloat16"))
    (tmp_path / "config.json").write_text("{}")
    assert "--attention-backend" not in engine_command(spec)


def test_a_gpu_engine_gets_none_of_the_cpu_settings() -> None:
    command = engine_command(SPEC, cpu=False)
    assert "--worker-cls" not in command
    assert "--enforce-eager" not in command
    assert "KVFERRY_CPU_YIELD_SLEEP_US" not in engine_environment(SPEC, {}, cpu=False)


def test_extra_flags_come_last_so_that_they_win() -> None:
    assert engine_command(replace(SPEC, extra=("--dtype", "bfloat16")))[-2:] == ["--dtype", "bfloat16"]


def test_an_uneven_partition_is_handed_over_in_the_environment() -> None:
    assert engine_environment(SPEC, {})["VLLM_PP_LAYER_PARTITION"] == "1,2,1"


def test_a_partition_meant_for_another_engine_is_not_inherited() -> None:
    spec = replace(SPEC, layout=Layout())
    assert "VLLM_PP_LAYER_PARTITION" not in engine_environment(spec, {"VLLM_PP_LAYER_PARTITION": "1,3"})


def test_cpu_engines_get_both_cures_and_keep_the_callers_environment() -> None:
    environment = engine_environment(replace(SPEC, environment={"OMP_NUM_THREADS": "4"}), {"HOME": "/home/me"})
    assert environment["KVFERRY_CPU_YIELD_SLEEP_US"] == "20"
    assert environment["HOME"] == "/home/me"
    assert environment["OMP_NUM_THREADS"] == "4"


def test_the_router_gets_every_instance_and_explicit_policies() -> None:
    command = router_command(["http://p:1", "http://p:2"], ["http://d:3"], port=9, metrics_port=10)
    assert [command[i + 1] for i, flag in enumerate(command) if flag == "--prefill"] == ["http://p:1", "http://p:2"]
    assert [command[i + 1] for i, flag in enumerate(command) if flag == "--decode"] == ["http://d:3"]
    assert _value(command, "--kv-connector") == "nixl"
    assert _value(command, "--prefill-policy") == _value(command, "--decode-policy") == "round_robin"


def test_the_router_is_told_where_mooncakes_prefill_is_found() -> None:
    command = router_command(["http://p:1"], ["http://d:3"], port=9, metrics_port=10, bootstrap=11)
    assert _value(command, "--kv-connector") == "mooncake"
    at = command.index("--prefill")
    assert command[at + 1 : at + 3] == ["http://p:1", "11"]


def test_the_router_asks_plain_instances_in_turn() -> None:
    command = spreading_command(["http://a:1", "http://b:2"], port=9, metrics_port=10)
    at = command.index("--worker-urls")
    assert command[at + 1 : at + 3] == ["http://a:1", "http://b:2"]
    assert _value(command, "--policy") == "round_robin"
    assert _value(command, "--port") == "9"
    assert "--vllm-pd-disaggregation" not in command


def test_another_interpreter_starts_an_engine() -> None:
    assert engine_command(SPEC, python="/elsewhere/python")[0] == "/elsewhere/python"
