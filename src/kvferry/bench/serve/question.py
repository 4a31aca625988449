"""What is asked of every contender."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry.bench.serve.contenders import Contender
from kvferry.bench.serve.result import Load, Prompts, Stall
from kvferry.cluster.spec import Layout, check_layout, kv_bytes_per_token, read_model_config
from kvferry.errors import SpecError

BLOCK_TOKENS = 128
SPARE_TOKENS = 128
STALL_ANSWER_TOKENS = 2048
"""What a watched request may be asked for, beside the length of the prompts that come meanwhile."""
MOST = 1_000_000
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Question:
    """All of a run. Whatever is wrong with it is a ``SpecError`` when it is made.

    Attributes:
        sequences: requests that an engine runs at once (``--max-num-seqs``).
        warmups: requests before anything is measured, one after the other.
        idle_s: how long engines are watched doing nothing.
        start_s: how long they may take to start.
        pinned: each engine has an equal share of the cores to itself.
        own_front: whether the project's gateway is in front of the project's engines, or vllm-router as for all others.
    """

    model: Path
    contenders: Mapping[str, Contender]
    prompts: Prompts
    loads: tuple[Load, ...]
    rounds: int
    prefill: Layout = field(default_factory=Layout)
    decode: Layout = field(default_factory=Layout)
    stall: Stall | None = None
    dtype: str = "bfloat16"
    sequences: int = 16
    warmups: int = 2
    idle_s: float = 5.0
    start_s: float = 300.0
    pinned: bool = False
    own_front: bool = True
    percentiles: tuple[float, ...] = (99.0,)
    goodput_ms: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        for option, value, least in self._bounded():
            if not least <= value <= MOST:
                raise SpecError(f"{option} {value:g} is not between {least} and {MOST:,}")
        for load in self.loads:
            if load.rate is not None and not 0 < load.rate <= MOST:
                raise SpecError(f"--request-rate {load.rate:g} is not above 0; inf sends all at once")
            if load.concurrency is not None and not 1 <= load.concurrency <= MOST:
                raise SpecError(f"--max-concurrency {load.concurrency} is not at least 1")
        if not all(0 <= percentile <= 100 for percentile in self.percentiles):
            raise SpecError("--metric-percentiles are between 0 and 100")
        if self.dtype not in DTYPES:
            raise SpecError(f"--dtype {self.dtype} is not one of {', '.join(DTYPES)}")
        config = self.config
        for layout in (self.prefill, self.decode):
            check_layout(layout, config)
        longest = config.get("max_position_embeddings", MOST)
        if self.longest > longest:
            raise SpecError(f"prompts and answers of {self.longest} tokens: the model takes {longest} at most")

    def _bounded(self) -> Sequence[tuple[str, float, int]]:
        asked, stall = self.prompts, self.stall
        bounded = [
            ("--num-prompts", asked.count, 1),
            ("--random-input-len", asked.input_len, 1),
            ("--random-output-len", asked.output_len, 1),
            ("--random-prefix-len", asked.prefix_len, 0),
            ("--seed", asked.seed, 0),
            ("--rounds", self.rounds, 1),
            ("--num-warmups", self.warmups, 1),
            ("--max-num-seqs", self.sequences, 1),
            ("--idle", self.idle_s, 0),
        ]
        if not 0 < asked.burstiness <= MOST:
            raise SpecError(f"--burstiness {asked.burstiness:g} is not above 0")
        if stall is not None:
            bounded += [("--stall-input-len", stall.input_len, 1), ("--stall-turns", stall.turns, 1)]
            if not 0 < stall.seconds <= MOST:
                raise SpecError(f"--stall-seconds {stall.seconds:g} is not above 0")
        return bounded

    @property
    def config(self) -> dict[str, Any]:
        return read_model_config(self.model)

    @property
    def vocabulary(self) -> int:
        return int(self.config.get("vocab_size", 256))

    @property
    def request_tokens(self) -> int:
        """Of a prompt and its answer."""
        return self.prompts.prefix_len + self.prompts.input_len + self.prompts.output_len

    @property
    def longest(self) -> int:
        """Tokens that an engine has to take in one request (``--max-model-len``)."""
        stalled = 0 if self.stall is None else self.stall.input_len + 1
        running = 0 if self.stall is None else STALL_ANSWER_TOKENS + SPARE_TOKENS
        return -(-max(self.request_tokens + 1, stalled, running) // BLOCK_TOKENS) * BLOCK_TOKENS

    @property
    def cache_bytes(self) -> int:
        """Of each worker's KV cache: for every request that can be under way, with some to spare."""
        each = self.request_tokens + SPARE_TOKENS
        most = max((load.concurrency or self.prompts.count for load in self.loads), default=1)
        under_way = min(most, self.prompts.count) * each
        stalled = 0 if self.stall is None else 3 * self.stall.input_len + 2 * STALL_ANSWER_TOKENS
        tokens = max(2 * self.longest, under_way + 2 * each, stalled)
        return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS * self.kv_bytes_per_token

    @property
    def kv_bytes_per_token(self) -> int:
        return kv_bytes_per_token(self.config, self.dtype)
