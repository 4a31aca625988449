"""Holds a prefill and a decode instance against a plain engine: the same tokens, and really moved."""

import enum
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.cluster.dispatch import Completion, Dispatcher, Legs
from kvferry.cluster.metrics import NO_HITS, PrefixHits
from kvferry.cluster.prompts import NamedPrompt
from kvferry.cluster.spec import InstanceSpec
from kvferry.cluster.transfers import NOTHING_MOVED, Moved, await_transfers
from kvferry.errors import DispatchError

# Two candidates closer than this are a tie: sums over tensor parallel ranks are added in another order, which moves a
# log probability by some 1e-5 in float32, and by up to about 0.1 in bfloat16.
TIE_BOUNDS = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.05}
SETTLE_S = 5.0  # counters and the transfer log follow an answer at once, but not before it
POLL_S = 0.05


class Verdict(enum.Enum):
    """What became of one prompt. Only the first two are good."""

    EQUAL = "equal"
    TIE = "tie"
    DIFFERENT = "DIFFERENT"
    NOT_TRANSFERRED = "NOT TRANSFERRED"
    FAILED = "FAILED"

    @property
    def good(self) -> bool:
        return self in (Verdict.EQUAL, Verdict.TIE)


@dataclass(frozen=True)
class Outcome:
    """One prompt's verdict. `tokens` counts the prompt's; `detail` says why where the verdict is not EQUAL."""

    name: str
    verdict: Verdict
    tokens: int = 0
    hits: PrefixHits = NO_HITS
    moved: Moved = NOTHING_MOVED
    detail: str = ""


def compare(expected: Completion, got: Completion, tie_bound: float) -> tuple[Verdict, str]:
    """Compare tokens up to the first that differs; what follows it answers another text and says nothing."""
    pairs = itertools.zip_longest(expected.tokens, got.tokens)
    position = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    if position is None:
        return Verdict.EQUAL, ""
    gap = max(_gap(expected, got, position), _gap(got, expected, position))
    where = f"position {position}: expected {expected.tokens[position:][:1]}, got {got.tokens[position:][:1]}"
    if gap <= tie_bound:
        return Verdict.TIE, f"{where}; tied, {gap:.1e} apart"
    return Verdict.DIFFERENT, f"{where}; log probabilities {gap:.3g} apart, a tie is at most {tie_bound:g}"


def _gap(one: Completion, other: Completion, position: int) -> float:
    """How far apart `one` saw its own token and the other's, in log probability; infinite where it did not see both."""
    try:
        seen = one.candidates[position]
        return abs(seen[one.tokens[position]] - seen[other.tokens[position]])
    except (IndexError, KeyError):
        return float("inf")


def missing_transfer(outcome_tokens: int, hits: PrefixHits, moved: Moved, workers: int) -> str:
    """Why the prompt's KV cache cannot have come from the prefill instance, or "" where it has.

    Without this check a decode instance that quietly computed everything itself would pass. The last prompt token is
    always computed, so it need not be moved.
    """
    needed = outcome_tokens - hits.local - 1
    if needed <= 0:
        return ""
    if hits.external < needed:
        return f"{hits.external} of {needed} tokens came through the connector"
    if unused := [transfer for transfer in moved.transfers if not transfer.used]:
        return f"worker {unused[0].consumer} could not use what it read: {unused[0].result}"
    if len(moved.transfers) < workers:
        return f"{len(moved.transfers)} of {workers} workers logged a transfer"
    return ""


@dataclass(frozen=True)
class Verifier:
    """Runs prompts through a pair of instances. `transfer_log` is the decode instance's."""

    dispatcher: Dispatcher
    prefill: InstanceSpec
    decode: InstanceSpec
    transfer_log: Path
    tie_bound: float

    def run(self, prompts: Sequence[NamedPrompt], expected: Sequence[Completion]) -> Iterator[Outcome]:
        """One outcome per prompt, as they come. Prompts go round over all data parallel ranks of both sides."""
        for turn, (prompt, reference) in enumerate(zip(prompts, expected, strict=True)):
            yield self._one(prompt, reference, turn)

    def _one(self, prompt: NamedPrompt, reference: Completion, turn: int) -> Outcome:
        try:
            before = PrefixHits.read(self.decode.url)
            legs = self._both_legs(prompt, turn)
            return self._judge(prompt, reference, legs, before)
        except DispatchError as error:
            return Outcome(prompt.name, Verdict.FAILED, detail=str(error))

    def _both_legs(self, prompt: NamedPrompt, turn: int) -> Legs:
        prefill_rank, decode_rank = ranks(turn, self.prefill.layout.dp, self.decode.layout.dp)
        return self.dispatcher.both_legs(
            self.prefill.url, self.decode.url, prompt.prompt, prefill_rank=prefill_rank, decode_rank=decode_rank
        )

    def _judge(self, prompt: NamedPrompt, reference: Completion, legs: Legs, before: PrefixHits) -> Outcome:
        tokens = legs.decode.prompt_tokens
        hits = self._settled_hits(before, tokens)
        moved = self._moved(legs, tokens - hits.local > 1)
        verdict, detail = compare(reference, legs.decode, self.tie_bound)
        missing = missing_transfer(tokens, hits, moved, self._readers)
        if verdict.good and missing:
            verdict, detail = Verdict.NOT_TRANSFERRED, missing
        return Outcome(prompt.name, verdict, tokens, hits, moved, detail)

    @property
    def _readers(self) -> int:
        return self.decode.layout.core_workers

    def _settled_hits(self, before: PrefixHits, tokens: int) -> PrefixHits:
        end = time.monotonic() + SETTLE_S
        while True:
            hits = PrefixHits.read(self.decode.url).since(before)
            if hits.local + hits.external >= tokens - 1 or time.monotonic() > end:
                return hits
            time.sleep(POLL_S)

    def _moved(self, legs: Legs, expected: bool) -> Moved:
        readers = self._readers if expected else 0
        return await_transfers(self.transfer_log, lambda t: legs.request_id in t.request, readers, SETTLE_S)


def ranks(turn: int, prefill_dp: int, decode_dp: int) -> tuple[int | None, int | None]:
    """Data parallel ranks for the request of that turn, so that every pair of ranks is met; None where there is one."""
    prefill = turn % prefill_dp
    decode = (turn // prefill_dp) % decode_dp
    return (prefill if prefill_dp > 1 else None), (decode if decode_dp > 1 else None)


def reference(dispatcher: Dispatcher, engine: InstanceSpec, prompts: Sequence[NamedPrompt]) -> list[Completion]:
    """What a plain engine answers to the prompts.

    Raises:
        DispatchError: it does not answer one of them.
    """
    return [dispatcher.complete(engine.url, prompt.prompt) for prompt in prompts]
