"""The prompts that two engines are compared on."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.cluster.dispatch import Prompt
from kvferry.errors import SpecError

CPU_BLOCK_TOKENS = 128
LONG_TOKENS = 1500


@dataclass(frozen=True)
class NamedPrompt:
    """A prompt, as text or token ids, and what it is called in tables."""

    name: str
    prompt: Prompt


def default_prompts(vocabulary: int, block_tokens: int = CPU_BLOCK_TOKENS, seed: int = 0) -> list[NamedPrompt]:
    """Lengths around the block boundaries, a repeated prefix, and a long one; random token ids drawn from `seed`.

    Another seed gives other prompts of the same lengths. Instances that are used again need them: an old prompt would
    be answered from the prefix cache, or find its old KV cache in the very blocks that should have been written.
    """
    draw = _token_source(vocabulary, seed)
    several = draw(2 * block_tokens + block_tokens // 3)
    return [
        NamedPrompt("one token", draw(1)),
        NamedPrompt("short", draw(7)),
        NamedPrompt("exactly one block", draw(block_tokens)),
        NamedPrompt("one block and a token", draw(block_tokens + 1)),
        NamedPrompt("several blocks", several),
        NamedPrompt("repeated prefix", several[: 2 * block_tokens] + draw(block_tokens + 17)),
        NamedPrompt(f"{LONG_TOKENS:,} tokens", draw(LONG_TOKENS)),
        # Where the last token attends to one that a window of a block has just left behind.
        NamedPrompt("two blocks less a token", draw(2 * block_tokens - 1)),
    ]


def _token_source(vocabulary: int, seed: int) -> Callable[[int], list[int]]:
    # Special tokens sit at either end of most vocabularies.
    first, last = vocabulary // 50 + 2, vocabulary - vocabulary // 50 - 2
    source = random.Random(seed)
    return lambda count: [source.randint(first, last) for _ in range(count)]


def load_prompts(path: Path) -> list[NamedPrompt]:
    """One prompt per line: plain text, or a JSON string, or a JSON list of token ids. Empty lines are skipped.

    Raises:
        SpecError: the file cannot be read, or holds no prompt.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"the prompts in {path} cannot be read: {error}") from error
    prompts = list(_named(lines))
    if not prompts:
        raise SpecError(f"there is no prompt in {path}")
    return prompts


def _named(lines: list[str]) -> Iterator[NamedPrompt]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield NamedPrompt(f"line {number}", _prompt(line))


def _prompt(line: str) -> Prompt:
    try:
        value: Any = json.loads(line)
    except ValueError:
        return line
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(token) is int and token >= 0 for token in value):
        return value
    return line
