"""What is asked: random prompts that nobody has in a cache."""

import numpy as np

from kvferry.bench.serve.result import Prompts

LOWEST_TOKEN = 3
"""Tokens below tend to have a meaning of their own, such as the end."""
STALL_STREAM, STALL_PULLED = 1_000_001, 1_000_002
WARMUP = 1_000_003


def prompts(asked: Prompts, vocabulary: int, *stream: int) -> list[list[int]]:
    """Token ids of each prompt; the same for one seed and `stream` (round, load), and others for any other."""
    prefix = tokens(asked.prefix_len, vocabulary, asked.seed)
    own = np.random.default_rng([asked.seed, 1, *stream])
    return [prefix + _draw(own, asked.input_len, vocabulary) for _ in range(asked.count)]


def tokens(count: int, vocabulary: int, *seed: int) -> list[int]:
    """That many random token ids."""
    return _draw(np.random.default_rng(list(seed)), count, vocabulary)


def _draw(source: np.random.Generator, count: int, vocabulary: int) -> list[int]:
    return [int(token) for token in source.integers(min(LOWEST_TOKEN, vocabulary - 1), vocabulary, count)]
