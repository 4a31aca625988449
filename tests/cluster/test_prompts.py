"""The prompts that engines are compared on."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cluster.prompts import NamedPrompt, default_prompts, load_prompts
from kvferry.errors import SpecError


@given(vocabulary=st.integers(20, 200_000), block=st.sampled_from([16, 128]), seed=st.integers(0, 2**32))
def test_lengths_meet_the_block_boundaries_and_tokens_are_ordinary(vocabulary: int, block: int, seed: int) -> None:
    prompts = default_prompts(vocabulary, block, seed)
    lengths = {len(prompt.prompt) for prompt in prompts}
    assert {1, block, block + 1, 1500} <= lengths
    assert all(2 <= token < vocabulary - 1 for prompt in prompts for token in prompt.prompt)


def test_one_prompt_repeats_the_blocks_of_another() -> None:
    prompts = {prompt.name: prompt.prompt for prompt in default_prompts(384)}
    assert prompts["repeated prefix"][:256] == prompts["several blocks"][:256]
    assert prompts["repeated prefix"] != prompts["several blocks"]


def test_a_seed_gives_the_same_prompts_again_and_another_gives_others() -> None:
    assert default_prompts(384, seed=1) == default_prompts(384, seed=1)
    assert default_prompts(384, seed=1) != default_prompts(384, seed=2)


def test_a_file_holds_text_json_strings_and_token_ids(tmp_path: Path) -> None:
    (path := tmp_path / "prompts").write_text('plain text\n\n"a\\nb"\n[1, 2, 3]\n[1, "x"]\n42\n')
    assert load_prompts(path) == [
        NamedPrompt("line 1", "plain text"),
        NamedPrompt("line 3", "a\nb"),
        NamedPrompt("line 4", [1, 2, 3]),
        NamedPrompt("line 5", '[1, "x"]'),
        NamedPrompt("line 6", "42"),
    ]


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: bytes) -> None:
    (path := tmp_path / "prompts").write_bytes(content)
    with pytest.raises(SpecError, match="prompt"):
        load_prompts(path)
