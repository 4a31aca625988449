"""cluster.yaml: what is not known is refused with the nearest that is, and the more special says the last word."""

from pathlib import Path
from typing import Any

import pytest

from kvferry.cluster.flags import to_arguments
from kvferry.cluster.manifest import GATEWAY_OPTIONS, Role, Router, gateway_arguments, parse, read_yaml
from kvferry.cluster.spec import Layout
from kvferry.errors import SpecError

WHOLE = """
model: /models/m
name: blue
port: 9000
prefill:
  layout: tp=2,pp=2
  replicas: 2
  vllm: {max-num-seqs: 16}
decode:
  layout: {tp: 4, dp: 2}
  connector: {read_timeout: 20}
vllm: {max-model-len: 32768, max-num-seqs: 64}
connector: {kv_lease_duration: 20, read_timeout: 10}
environment: {NCCL_DEBUG: INFO, LEVEL: 1}
instances:
  prefill-1:
    layout: pp=4
    vllm: {seed: 7, max-num-seqs: 8}
    environment: {NCCL_DEBUG: WARN}
gateway: {workers: 2, access-log: false}
"""


def _read(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return read_yaml(path)


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    manifest = parse(_read(tmp_path, WHOLE), "cluster.yaml")
    assert manifest.name == "blue"
    assert manifest.router is Router.GATEWAY
    assert manifest.layout(Role.PREFILL, 0) == Layout(tp=2, pp=2)
    assert manifest.layout(Role.DECODE, 0) == Layout(tp=4, dp=2)
    assert gateway_arguments(manifest.gateway) == ["--workers", "2", "--no-access-log"]


def test_an_instance_wins_over_its_role_and_a_role_over_all(tmp_path: Path) -> None:
    manifest = parse(_read(tmp_path, WHOLE))
    assert manifest.layout(Role.PREFILL, 1) == Layout(pp=4)
    flags = [to_arguments(manifest.flags(*one)) for one in ((Role.PREFILL, 0), (Role.PREFILL, 1), (Role.DECODE, 0))]
    assert flags == [
        ("--max-model-len", "32768", "--max-num-seqs", "16"),
        ("--max-model-len", "32768", "--seed", "7", "--max-num-seqs", "8"),
        ("--max-model-len", "32768", "--max-num-seqs", "64"),
    ]
    assert manifest.connector_config(Role.DECODE, 0) == {"kv_lease_duration": 20, "read_timeout": 20}
    assert manifest.environment_of(Role.PREFILL, 1) == {"NCCL_DEBUG": "WARN", "LEVEL": "1"}


def test_a_model_is_all_that_is_needed() -> None:
    manifest = parse({"model": "org/model"})
    assert manifest.served_name == "org/model"
    assert manifest.layout(Role.DECODE, 0) == Layout()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prefil": {}}, "unknown key 'prefil': did you mean 'prefill'?"),
        ({"prefill": {"replica": 2}}, "unknown key 'replica' in prefill: did you mean 'replicas'?"),
        ({"prefill": {"layout": {"tpp": 2}}}, "prefill.layout: unknown key 'tpp' in 'tpp=2'"),
        ({"decode": {"layout": "ttp=2"}}, "decode.layout: unknown key 'ttp' in 'ttp=2'"),
        ({"decode": {"layout": {"decode-context-parallel-size": 2}}}, "; did you mean dcp?"),
        ({"instances": {"decode-0": {"ports": 1}}}, "unknown key 'ports' in instances.decode-0: did you mean 'port'?"),
        ({"instances": {"decod-0": {}}}, "unknown key 'decod-0' in instances: did you mean 'decode-0'?"),
        ({"connector": {"read_timeot": 1}}, "unknown key 'read_timeot': did you mean 'read_timeout'?"),
        ({"gateway": {"worker": 2}}, "unknown key 'worker' in gateway: did you mean 'workers'?"),
        ({"gateway": {"workers": 0}}, "gateway.workers: Expected `int` >= 1"),
        ({"gateway": {"prefill-policy": "best"}}, "gateway.prefill-policy: Invalid enum value 'best'"),
        ({"gateway": {"api-key-file": "/nowhere"}}, "gateway: /nowhere cannot be read"),
        ({"zzz": 1}, "unknown key 'zzz': known are"),
        ({"prefill": {"replicas": 0}}, "prefill.replicas: Expected `int` >= 1"),
        ({"prefill": "tp=2"}, "prefill: Expected `object`, got `str`"),
        ({"port": 70000}, "port: Expected `int` <= 65535"),
        ({"router": "nginx"}, "router: Invalid enum value 'nginx'"),
        ({"name": "a/b"}, "name: Expected `str` matching"),
        ({"router": "vllm-router", "gateway": {"workers": 2}}, "gateway: there is no gateway with router: vllm-router"),
        ({"connector": {"kv_lease_duration": -1}}, "kv_connector_extra_config"),
        ({"connector": {"side_channel_port": 5}}, "connector: side_channel_port differs between instances"),
        ({"decode": {"connector": {"secret_file": "x"}}}, "use secret_file at the top"),
        ({"port": 9000, "instances": {"decode-0": {"port": 9000}}}, "instances.decode-0.port: 9000 is port already"),
        ({"vllm": {"host": "0.0.0.0"}}, "vllm: --host is set by the cluster"),
        ({"model": 5}, "model: Expected `str`, got `int`"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(change: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse({"model": "/models/m", **change}, "cluster.yaml")
    text = str(caught.value)
    assert text.startswith("cluster.yaml: ")
    assert said in text
    assert "\n" not in text


@pytest.mark.parametrize("raw", [None, [], "text", {}, {"name": "blue"}])
def test_without_a_model_there_is_nothing_to_serve(raw: Any) -> None:
    with pytest.raises(SpecError, match="model"):
        parse(raw, "cluster.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: a\nmodel: b\n", "line 2: 'model' is there twice"),
        ("model: [a\n", "line 2: expected ',' or ']'"),
        ("a: !!python/object:os.system {}\n", "line 1: could not determine a constructor"),
    ],
)
def test_a_file_that_is_no_plain_yaml_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        _read(tmp_path, text)
    assert said in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"none.yaml cannot be read: No such file"):
        read_yaml(tmp_path / "none.yaml")


def test_an_instance_that_only_scaling_adds_may_be_described_before() -> None:
    parse({"model": "/models/m", "instances": {"decode-5": {"vllm": {"seed": 1}}}})


def test_options_of_the_gateway_are_those_of_its_command() -> None:
    import inspect

    from kvferry.cli.gateway import gateway

    known = {name.replace("_", "-") for name in inspect.signature(gateway).parameters}
    assert set(GATEWAY_OPTIONS) <= known
