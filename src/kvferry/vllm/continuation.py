"""From where a decode instance can go on with a cache that it loads.

A load that covers a whole prompt has the last token computed once more, for its logits. That needs the cache as it was
before that token. Plain attention still has it. A recurrent state does not: it cannot be taken back. Nor does a window
or a chunk: by then vLLM may have freed the block with the oldest token that the last one attends to, on both sides. So
with these kinds a producer stops one token short of the prompt, and a consumer computes that token itself, which it
would have done anyway.

Where a recurrent layer has states for guesses of speculative decoding, those lie behind the prompt's in the block list,
and a consumer's first step reads the prompt's, as after a hit in the prefix cache. Two steps of vLLM's scheduler need
care at a producer. It fills up a step of one token with made-up guesses, which moves the state into another block when
they reach one: such a prefill offers nothing. And it does so with a prompt of one token, whose state then goes on from
whatever the block held before: no prompt is shortened to one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import MambaSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class Guesses:
    """A KV cache group of recurrent layers with a state for each guess: its number, tokens per block, and guesses."""

    group: int
    block_tokens: int
    count: int

    def follow(self, blocks: Sequence[Sequence[int]], tokens: int) -> bool:
        """Whether they lie behind the block of the last of ``tokens``, which is the block of the state after it."""
        return len(blocks[self.group]) == -(-tokens // self.block_tokens) + self.count


@dataclass(frozen=True, slots=True)
class Continuation:
    """Which part of a prompt is handed over; the same on both sides, since it follows from the model.

    Attributes:
        withheld: tokens at the prompt's end that a producer does not compute and a consumer does not load.
        exact: the cache stands for all of its tokens or for none, as a recurrent state does.
        guesses: this side's own, where states of guesses must be told from the prompt's.
    """

    withheld: int = 0
    exact: bool = False
    guesses: tuple[Guesses, ...] = ()

    def shorten(self, request: Request) -> None:
        """Let a prefill stop short of its prompt's end. What it then samples is nobody's answer."""
        prompt, held = request.prompt_token_ids, self.held(request.num_prompt_tokens)
        # A request that reads no cache (log probabilities of its prompt) is computed whole by the consumer too.
        if prompt is None or held == len(prompt) or request.skip_reading_prefix_cache:
            return
        request.prompt_token_ids = prompt[:held]
        del request._all_token_ids[held:]
        request.num_prompt_tokens, request.max_tokens = held, 1

    def held(self, prompt: int) -> int:
        """Tokens of a prompt that a producer computes; all of one that is too short to be shortened."""
        least = 2 if self.guesses else 1
        return prompt - self.withheld if prompt - self.withheld >= least else prompt

    def offers(self, computed: int, prompt: int, blocks: Sequence[Sequence[int]]) -> int:
        """Tokens that a finished prefill has to offer, given its block ids by KV cache group."""
        if not self.exact:
            return min(computed, prompt)
        return prompt if computed == prompt and all(group.follow(blocks, prompt) for group in self.guesses) else 0

    def loads(self, offered: int, prompt: int) -> int:
        """Tokens of an offer that a request can load, from its first on."""
        if self.exact:
            # Whatever this side would withhold: the other one has decided, and one token is left to be computed.
            return offered if 0 < offered < prompt else 0
        return max(0, min(offered, prompt - self.withheld))


PLAIN = Continuation()


def continuation(config: VllmConfig, kv_cache_config: KVCacheConfig) -> Continuation:
    """What the KV cache groups of an engine, and its drafter, allow."""
    specs = list(layer_specs(kv_cache_config))
    exact = any(isinstance(spec, MambaSpec) for spec in specs)
    windowed = any(getattr(spec, what, None) for spec in specs for what in ("sliding_window", "attention_chunk_size"))
    # A drafter of several modules reads that many tokens ahead, and must not see unverified ones in place of them.
    ahead = getattr(config, "num_prefill_lookahead_tokens", 0)
    return Continuation(max(int(exact or windowed), ahead - 1), exact, tuple(_guesses(kv_cache_config)))


def _guesses(kv_cache_config: KVCacheConfig) -> Iterator[Guesses]:
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        for spec in islice(specs_of(group), 1):
            if count := getattr(spec, "num_speculative_blocks", 0):
                yield Guesses(number, spec.block_size, count)


def layer_specs(kv_cache_config: KVCacheConfig) -> Iterator[Any]:
    """Of every layer, or one that stands for all layers of a KV cache group."""
    for group in kv_cache_config.kv_cache_groups:
        yield from specs_of(group)


def specs_of(group: KVCacheGroupSpec) -> Iterator[Any]:
    spec = group.kv_cache_spec
    yield from getattr(spec, "kv_cache_specs", {"": spec}).values()
