"""Prepared models: cached whole or not at all, and worth comparing tokens of."""

import json
import random
from pathlib import Path

import pytest

from kvferry.cluster import cache
from kvferry.cluster.cache import cached
from kvferry.cluster.models import _pad_heads
from kvferry.cluster.spec import Layout, check_layout, read_model_config
from kvferry.cluster.tiny import RECIPES, tiny
from kvferry.errors import ModelError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def test_the_cache_directory_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFERRY_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.cache_directory() == Path("/xdg/kvferry")
    monkeypatch.setenv("KVFERRY_CACHE", "/chosen")
    assert cache.cache_directory() == Path("/chosen")


def test_a_thing_is_built_once(tmp_path: Path) -> None:
    first = cached("thing", lambda path: (path / "file").write_text("x") and None, tmp_path)
    second = cached("thing", lambda path: pytest.fail("built again"), tmp_path)
    assert first == second == tmp_path / "thing"


def test_an_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    def interrupted(path: Path) -> None:
        (path / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached("thing", interrupted, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_first_of_two_builders_wins_and_both_succeed(tmp_path: Path) -> None:
    def slower(path: Path) -> None:
        cached("thing", lambda other: (other / "file").write_text("first") and None, tmp_path)
        (path / "file").write_text("second")

    assert (cached("thing", slower, tmp_path) / "file").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["thing"]


def test_an_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(ModelError, match="qwen2-6heads"):
        tiny("gpt5")


@pytest.mark.parametrize("kind", sorted(RECIPES))
def test_a_tiny_model_has_the_shape_of_its_recipe_and_can_chat(kind: str) -> None:
    model = tiny(kind)
    config = read_model_config(model)
    recipe = RECIPES[kind].get("text_config", RECIPES[kind])  # with images, the language model's is a part of it
    assert config.get("num_hidden_layers") == recipe.get("num_hidden_layers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hé, 7?"}], tokenize=False)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert max(tokenizer(text)["input_ids"]) < config["vocab_size"]


def test_the_six_head_model_can_be_split_in_three_and_in_two() -> None:
    config = read_model_config(tiny("qwen2-6heads"))
    for tp in (1, 2, 3):
        check_layout(Layout(tp=tp), config)


@pytest.mark.parametrize("kind", ["qwen2", "qwen2-6heads", "deepseek-v2"])
def test_greedy_tokens_depend_on_any_token_of_the_prompt(kind: str) -> None:
    model = _load(tiny(kind))
    source = random.Random(7)
    prompt = [source.randint(10, 370) for _ in range(160)]
    answers = {tuple(_greedy(model, prompt))}
    for position in (0, 40, 80, 120, 159):
        changed = [*prompt[:position], prompt[position] + 1, *prompt[position + 1 :]]
        answers.add(tuple(_greedy(model, changed)))
    assert len(answers) >= 5


def test_padded_heads_change_nothing_that_is_computed(tmp_path: Path) -> None:
    source, padded = _make_llama(tmp_path / "source"), tmp_path / "padded"
    _pad_heads(source, padded)
    config = json.loads((padded / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (12, 4)
    prompt = torch.tensor([list(range(10, 60))])
    with torch.no_grad():
        torch.testing.assert_close(_load(padded)(prompt).logits, _load(source)(prompt).logits)


def _make_llama(directory: Path) -> Path:
    """9 attention and 3 KV heads, as SmolLM2 has."""
    config = transformers.LlamaConfig(
        vocab_size=400,
        hidden_size=144,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=16,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(tiny("llama")).save_pretrained(directory)
    return directory


def _load(path: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def _greedy(model, prompt: list[int], count: int = 6) -> list[int]:
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        answer = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
    return answer[0, len(prompt) :].tolist()
