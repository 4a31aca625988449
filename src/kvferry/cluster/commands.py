"""Command lines and environments of the processes of a cluster; functions without effects."""

import importlib.metadata
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvferry.cluster.spec import FLAGS, LOOPBACK, InstanceSpec, read_model_config
from kvferry.errors import SpecError

CONNECTOR = "KVFerryConnector"
YIELD_SLEEP_US = 20
PIPELINE_WORKER = "kvferry.vllm.cpu_worker.PipelineCPUWorker"

# Tensor parallel ranks on CPU spin while they wait for each other, and on a small machine everything else has been
# seen to stand still for up to a minute meanwhile: longer than the deadlines that suit a real deployment.
CPU_PATIENCE = {"kv_lease_duration": 300, "claim_timeout": 90, "handshake_timeout": 90}
# One thread per worker and everything on the loopback interface: several engines share a small machine.
CPU_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "KVFERRY_CPU_YIELD_SLEEP_US": str(YIELD_SLEEP_US),
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
}
# What a layout decides, and must not come from elsewhere.
OWN_VARIABLES = ("VLLM_PP_LAYER_PARTITION",)
ENVIRONMENT = {
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONUNBUFFERED": "1",
}


def cpu_build_installed() -> bool:
    """Whether the vLLM of this environment is the CPU build; decided without importing it."""
    try:
        importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def engine_command(spec: InstanceSpec, cpu: bool = True, python: str = sys.executable) -> list[str]:
    """The argument vector that starts an instance's API server with all its engine cores and workers."""
    # Not the `vllm` script: vllm-cpu's looks up a distribution named "vllm" and fails.
    pinned = ["taskset", "--cpu-list", ",".join(map(str, spec.cores))] if spec.cores else []
    command = [*pinned, python, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(spec.model), "--served-model-name", spec.served_name]
    command += ["--host", spec.host, "--port", str(spec.port)]
    command += _optional("--dtype", spec.dtype)
    command += _optional("--max-model-len", spec.max_model_len) + _optional("--max-num-seqs", spec.max_num_seqs)
    command += _layout_arguments(spec) + _connector_arguments(spec, cpu)
    if cpu:
        command += _cpu_arguments(spec)
    return [*command, *spec.extra]


def _optional(flag: str, value: object) -> list[str]:
    return [] if value is None else [flag, str(value)]


def _layout_arguments(spec: InstanceSpec) -> list[str]:
    sizes = {key: getattr(spec.layout, key) for key in FLAGS}
    shown = {key: size for key, size in sizes.items() if key in ("tp", "pp") or size > 1}
    return [argument for key, size in shown.items() for argument in (FLAGS[key], str(size))]


def _connector_arguments(spec: InstanceSpec, cpu: bool) -> list[str]:
    if spec.role is None:
        return []
    config: dict[str, object] = {"kv_connector": CONNECTOR, "kv_role": spec.role}
    if extra := {**(CPU_PATIENCE if cpu else {}), **spec.connector_config}:
        config["kv_connector_extra_config"] = extra
    if spec.kv_load_failure_policy:
        config["kv_load_failure_policy"] = spec.kv_load_failure_policy
    return ["--kv-transfer-config", json.dumps(config)]


def _cpu_arguments(spec: InstanceSpec) -> list[str]:
    arguments = ["--enforce-eager", *_optional("--kv-cache-memory-bytes", spec.kv_cache_bytes)]
    arguments += ["--api-server-count", "1"]
    if spec.layout.pp > 1:
        arguments += ["--worker-cls", PIPELINE_WORKER]
    if spec.dtype == "float32" and _latent(spec.model):
        # Where the processor has AMX, vLLM prefers a backend that refuses float32.
        arguments += ["--attention-backend", "CPU_MLA"]
    return arguments


def _latent(model: Path) -> bool:
    """Whether the model uses multi-head latent attention; a model that cannot be read is vLLM's to refuse."""
    try:
        return bool(read_model_config(model).get("kv_lora_rank"))
    except SpecError:
        return False


def engine_environment(spec: InstanceSpec, base: Mapping[str, str], cpu: bool = True) -> dict[str, str]:
    """`base` with what an instance needs added; the instance's own settings win."""
    environment = {**base, **ENVIRONMENT, **(CPU_ENVIRONMENT if cpu else {})}
    for name in OWN_VARIABLES:
        environment.pop(name, None)
    if spec.layout.partition is not None:
        environment["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, spec.layout.partition))
    return {**environment, **spec.environment}


def gateway_command(prefill: Sequence[str], decode: Sequence[str], port: int, options: Sequence[str] = ()) -> list[str]:
    """The argument vector of the gateway in front of prefill and decode instances, given by their URLs."""
    command = [sys.executable, "-m", "kvferry", "gateway", "--port", str(port), *options]
    for flag, urls in (("--prefill", prefill), ("--decode", decode)):
        for url in urls:
            command += [flag, url]
    return command


def router_command(
    prefill: Sequence[str],
    decode: Sequence[str],
    port: int,
    metrics_port: int,
    binary: str = "vllm-router",
    host: str = LOOPBACK,
    bootstrap: int | None = None,
) -> list[str]:
    """The argument vector of vllm-router in front of prefill and decode instances, given by their URLs.

    It speaks vLLM's NIXL parameters, or Mooncake's where the prefill instance has a `bootstrap` port for those.
    """
    command = [binary, "--vllm-pd-disaggregation", "--kv-connector", "nixl" if bootstrap is None else "mooncake"]
    for url in prefill:
        command += ["--prefill", url, *([] if bootstrap is None else [str(bootstrap)])]
    for url in decode:
        command += ["--decode", url]
    # The default policy asks every worker to render every request first; these two make no side calls.
    command += ["--prefill-policy", "round_robin", "--decode-policy", "round_robin"]
    return command + _router_arguments(host, port, metrics_port)


def spreading_command(
    urls: Sequence[str], port: int, metrics_port: int, binary: str = "vllm-router", host: str = LOOPBACK
) -> list[str]:
    """The argument vector of vllm-router in front of instances that each do everything, asked in turn."""
    return [binary, "--worker-urls", *urls, "--policy", "round_robin", *_router_arguments(host, port, metrics_port)]


def _router_arguments(host: str, port: int, metrics_port: int) -> list[str]:
    command = ["--host", host, "--port", str(port), "--prometheus-port", str(metrics_port)]
    command += ["--worker-startup-check-interval", "1", "--health-check-interval-secs", "1"]
    command += ["--health-check-timeout-secs", "5", "--health-failure-threshold", "5"]
    command += ["--health-success-threshold", "1"]
    return [*command, "--request-timeout-secs", "600", "--log-level", "warning"]
