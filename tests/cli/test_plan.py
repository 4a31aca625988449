"""``kvferry plan``: a table for people, JSON for programs, and one clear line for input that cannot be used."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvferry.cli import app

PAIR = ["--prefill", "tp=2", "--decode", "pp=2"]
CONFIG: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "vocab_size": 384,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "river-7b"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def _run(model: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", str(model), *arguments], env={"COLUMNS": "100"})


def _answer(model: Path, *arguments: str) -> dict[str, Any]:
    result = _run(model, *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_a_pair_that_works_is_shown(model: Path) -> None:
    """Memory, reads, descriptors, time and alternatives, for a directory and for the file in it alike."""
    result = _run(model, *PAIR)
    assert result.exit_code == 0
    for said in ("This pair works", "river-7b", "2,048 bytes per token", "Descriptors", "100 Gbit/s (assumed)", "Note"):
        assert said in result.stdout
    assert "pp1 tp0" in result.stdout
    assert _run(model / "config.json", *PAIR).stdout == result.stdout


def test_the_json_is_complete_and_stable(model: Path) -> None:
    """Every read is in it, its bytes add up, and it is byte for byte the same the next time."""
    answer = _answer(model, *PAIR, "--tokens", "100")
    assert answer["works"] is True
    plan = answer["plan"]
    assert sum(read["bytes_per_token"] for read in plan["reads"]) == plan["kv_bytes_per_token"] == 2048
    assert plan["kv_bytes_per_prompt"] == plan["totals"]["moved_bytes"] == 204_800
    assert plan["reads"][0] == {
        "reader": {"pp": 0, "tp": 0},
        "producer": {"pp": 0, "tp": 0},
        "layers": [0, 2],
        "heads": [0, 2],
        "bytes_per_token": 512,
        "tokens": 100,
        "state_bytes": 0,
        # In each of two layers six blocks whose two heads are one run of bytes, and two heads of a part of a block.
        "descriptors": {"contiguous": 16, "scattered": 16},
    }
    assert _run(model, *PAIR, "--json").stdout == _run(model, *PAIR, "--json").stdout


def test_states_of_recurrent_layers_have_columns_of_their_own(model: Path) -> None:
    recurrent = {"layer_types": ["conv", "full_attention", "conv", "conv"], "conv_L_cache": 3, "conv_dim": 256}
    assert "states" not in _run(model, *PAIR).stdout
    (model / "config.json").write_text(json.dumps({**CONFIG, **recurrent}))
    shown = _run(model, *PAIR).stdout
    for said in ("512 bytes per token", "3,072 bytes of states per request", "states each", "a state is counted once"):
        assert said in shown
    plan = _answer(model, *PAIR, "--tokens", "100")["plan"]
    assert plan["state_bytes"] == sum(read["state_bytes"] for read in plan["reads"]) == 3072
    assert plan["kv_bytes_per_prompt"] == plan["totals"]["moved_bytes"] == 51_200 + 3072


def test_what_unequal_shares_of_tokens_cost_is_said(model: Path) -> None:
    """And what an interleave of a block would save; between equal ones nothing is said."""
    (model / "config.json").write_text(json.dumps({**CONFIG, "kv_lora_rank": 96, "qk_rope_head_dim": 32}))
    shown = " ".join(_run(model, "--prefill", "tp=8,dcp=4", "--decode", "tp=4,dcp=2,pp=2").stdout.split())
    for said in (
        "tp=8,dcp=4 -> tp=4,pp=2,dcp=2",
        "prefill pp0 tp0..7 0..3 955 kB 256 1.54 MB",
        "Descriptors: 48,000 if blocks are contiguous, 48,000 if they are scattered.",
        "a range is one token of a layer at most. With interleave=16 (a block) on both sides: 3,000 or 3,000.",
        "tp=4,pp=2,dcp=4",
    ):
        assert said in shown
    one_sided = _run(model, "--prefill", "tp=8,dcp=4,interleave=8", "--decode", "tp=4").stdout
    assert "a range is 8 tokens of a layer at most" in one_sided
    assert "where dcp is 4" in " ".join(one_sided.split())
    assert "Ranks share out" not in _run(model, "--prefill", "tp=8,dcp=4", "--decode", "tp=4,dcp=4").stdout


def test_ranks_that_hold_nearly_the_same_are_one_row(model: Path) -> None:
    """6,000 tokens over 64 ranks: some have one more than others."""
    latent = {"kv_lora_rank": 96, "qk_rope_head_dim": 32, "num_attention_heads": 64}
    (model / "config.json").write_text(json.dumps({**CONFIG, **latent}))
    shown = _run(model, "--prefill", "tp=64,dcp=64", "--decode", "tp=64,dcp=64").stdout
    assert "pp0 tp0..63  pp0 tp0..63  0..3    0               1                16" in shown


def test_every_reason_is_a_line_and_the_exit_code_is_two(model: Path) -> None:
    result = _run(model, "--prefill", "tp=5,pp=9", "--decode", "pp=2,partition=1+1")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert [line.rpartition(": ")[2] for line in result.stderr.splitlines()] == [
        "8 attention heads cannot be split over tp=5",
        "4 KV heads cannot be split over, or repeated on, tp=5",
        "4 layers are too few for pp=9",
        "the partition adds up to 2 layers, the model has 4",
    ]


def test_the_json_of_a_pair_that_cannot_work_has_the_reasons(model: Path) -> None:
    result = _run(model, "--prefill", "tp=1", "--decode", "pp=9", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout) == {
        "works": False,
        "reasons": ["decode tp=1,pp=9,dp=1: 4 layers are too few for pp=9"],
        "plan": None,
    }


def test_many_ranks_that_do_the_same_are_one_row(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, "num_attention_heads": 64, "num_key_value_heads": 64}))
    shown = _run(model, "--prefill", "tp=64", "--decode", "tp=64,pp=2").stdout
    assert "pp1 tp0..63" in shown
    assert len(shown.splitlines()) < 40


def test_a_given_link_speed_sets_the_time(model: Path) -> None:
    slow, fast = (_answer(model, *PAIR, "--gbps", speed)["plan"] for speed in ("10", "40"))
    assert slow["totals"]["seconds"] == pytest.approx(4 * fast["totals"]["seconds"])
    assert slow["link"] == {"gbps": 10.0, "source": "given"}


def test_a_layout_with_nothing_better_near_it_says_so(model: Path) -> None:
    assert "saves anything" in _run(model, "--prefill", "tp=1", "--decode", "tp=1").stdout


def test_the_help_has_an_example() -> None:
    result = CliRunner().invoke(app, ["plan", "--help"])
    assert result.exit_code == 0
    assert "kvferry plan ~/models" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tokens", "0"], "--tokens 0 must be between 1 and"),
        (["--block-size", "99999"], "--block-size 99999 must be between 1 and"),
        (["--dtype", "int3"], "--dtype int3 is not one of"),
        (["--gbps", "nan"], "--gbps nan is not a positive number"),
        (["--gbps", "-1"], "--gbps -1 is not a positive number"),
        (["--measured", "/nowhere"], "/nowhere holds no load"),
        (["--measured", "/nowhere", "--gbps", "1"], "name one"),
        (["--picture", "reads.gif"], "must end in .svg or .png"),
        (["--decode", "tpp=2"], "did you mean tp?"),
    ],
)
def test_bad_input_is_one_line(model: Path, arguments: list[str], said: str) -> None:
    _assert_one_line(_run(model, *PAIR, *arguments), said)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ("{}", "config.json has no num_hidden_layers"),
        (json.dumps({**CONFIG, "vocab_size": 10**40}), "vocab_size="),
        (json.dumps({**CONFIG, "num_experts": 4, "mlp_only_layers": 3}), "a size of the model is not a number"),
    ],
)
def test_a_strange_configuration_is_one_line(model: Path, content: str, said: str) -> None:
    (model / "config.json").write_text(content)
    _assert_one_line(_run(model, *PAIR), said)


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    _assert_one_line(_run(tmp_path / "nothing", *PAIR), "there is no model directory")
    _assert_one_line(_run(tmp_path, *PAIR), "it has no config.json")


def _assert_one_line(result: Result, said: str) -> None:
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
