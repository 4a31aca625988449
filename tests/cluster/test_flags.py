"""vLLM's flags pass through as they are; those that the cluster sets itself are refused."""

from typing import Any

import pytest

from kvferry.cluster.flags import from_arguments, from_mapping, merged, to_arguments, value_of
from kvferry.errors import SpecError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max-model-len": 2048}, ["--max-model-len", "2048"]),
        ({"max_model_len": 2048}, ["--max-model-len", "2048"]),
        ({"--max-model-len": "2k"}, ["--max-model-len", "2k"]),
        ({"enforce-eager": True}, ["--enforce-eager"]),
        ({"enable-prefix-caching": False}, ["--no-enable-prefix-caching"]),
        ({"a-flag-of-next-year": None}, ["--a-flag-of-next-year"]),
        ({"middleware": ["a", "b"]}, ["--middleware", "a", "b"]),
        ({"hf-overrides": {"rope": {"x": 1}}}, ["--hf-overrides", '{"rope": {"x": 1}}']),
        ({"hf_overrides.rope_theta": 5}, ["--hf-overrides.rope_theta", "5"]),
        ({"-O3": True}, ["-O3"]),
    ],
)
def test_a_mapping_becomes_vllms_command_line(given: dict[str, Any], expected: list[str]) -> None:
    assert list(to_arguments(from_mapping(given, "vllm"))) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--seed", "-1", "--dtype=half"], ["--seed", "-1", "--dtype", "half"]),
        (["--max_num_seqs", "4"], ["--max-num-seqs", "4"]),
        (["--middleware", "a", "b", "--enforce-eager"], ["--middleware", "a", "b", "--enforce-eager"]),
        (["--hf-overrides", '{"a": 1}'], ["--hf-overrides", '{"a": 1}']),
        (["-O3"], ["-O3"]),
        (["--seed", "1", "--seed", "2"], ["--seed", "2"]),
        ([], []),
    ],
)
def test_a_command_line_passes_through(given: list[str], expected: list[str]) -> None:
    assert list(to_arguments(from_arguments(given, "after --"))) == expected


def test_what_begins_with_no_flag_is_refused() -> None:
    with pytest.raises(SpecError, match="after --: 'seed' is not a flag of vLLM"):
        from_arguments(["seed", "1"], "after --")


def test_the_last_level_wins_also_over_the_opposite_flag() -> None:
    levels = [from_mapping(level, "") for level in ({"a": 1, "x": True}, {"a": 2, "x": False}, {"x": True})]
    assert to_arguments(merged(*levels)) == ("--a", "2", "--x")


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("port", "give it as the port of one of `instances`"),
        ("tensor_parallel_size", "give it as the layout"),
        ("-tp", "give it as the layout"),
        ("-dcp", "give it as the layout"),
        ("prefill_context_parallel_size", "give it as the layout"),
        ("dcp-kv-cache-interleave-size", "give it as the layout"),
        ("kv-transfer-config", "give it as connector"),
        ("disable-log-stats", "/metrics"),
        ("ssl-keyfile", "TLS"),
    ],
)
def test_what_the_cluster_sets_itself_is_refused_with_the_place_to_say_it(flag: str, hint: str) -> None:
    with pytest.raises(SpecError, match=r"decode\.vllm: -") as caught:
        from_mapping({flag: "1"}, "decode.vllm")
    assert hint in str(caught.value)


def test_a_single_value_is_found_by_its_flag() -> None:
    flags = from_arguments(["--dtype", "half", "--eager"], "")
    assert value_of(flags, ["--eager", "--dtype"]) == "half"
    assert value_of(flags, ["--seed"]) is None
