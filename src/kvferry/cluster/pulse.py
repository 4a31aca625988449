"""How an instance is: whether it answers, how loaded it is, and whether a prefill and a decode instance really exchange
KV caches."""

import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from kvferry.cluster.allocation import Member
from kvferry.cluster.dispatch import Dispatcher, Sampling
from kvferry.cluster.metrics import total
from kvferry.cluster.verification import ranks
from kvferry.errors import DispatchError, StartError

TIMEOUT_S = 5.0
PROBE_TOKENS = 96
LOWEST_TOKEN, TOKENS_BELOW = 10, 10_000  # what is special stands at the ends of most vocabularies
SETTLE_S = 10.0  # counters follow an answer at once, but not before it
POLL_S = 0.05
ATTEMPTS = 3
_USAGE = re.compile(r"^vllm:kv_cache_usage_perc(?:\{.*\})? (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Load:
    """What an instance says of itself: requests, and the used fraction of its fullest rank's KV cache."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Load":
        """From the text of ``/metrics``."""
        running, waiting = (total(text, f"vllm:num_requests_{kind}") for kind in ("running", "waiting"))
        return cls(running, waiting, max(map(float, _USAGE.findall(text)), default=0.0))

    @property
    def idle(self) -> bool:
        """Whether it computes nothing, and holds nothing for anybody."""
        return not (self.running or self.waiting or self.kv_usage)


@dataclass(frozen=True)
class Pulse:
    """One look at an instance. `well` is None where it did not answer in time."""

    well: bool | None
    load: Load | None


def look(client: httpx.Client, url: str) -> Pulse:
    """Ask an instance how it is."""
    try:
        if client.get(f"{url}/health").status_code != httpx.codes.OK:
            return Pulse(False, None)
        answer = client.get(f"{url}/metrics")
    except httpx.TransportError:
        return Pulse(None, None)
    return Pulse(True, Load.parse(answer.text) if answer.status_code == httpx.codes.OK else None)


@dataclass(frozen=True)
class Moved:
    """Counters of a decode instance: bytes that its workers read and were told to be good, and reads that failed."""

    bytes: int
    failures: int

    @classmethod
    def read(cls, url: str) -> "Moved":
        """Raises ``DispatchError`` where the instance does not answer."""
        try:
            text = httpx.get(f"{url}/metrics", timeout=TIMEOUT_S, trust_env=False).raise_for_status().text
        except httpx.HTTPError as error:
            raise DispatchError(f"{url}/metrics cannot be read: {error}") from error
        counters = ("vllm:nixl_bytes_transferred_sum", "vllm:nixl_num_failed_transfers")
        return cls(*(total(text, counter) for counter in counters))


def connect(
    dispatcher: Dispatcher, prefill: Member, decode: Member, config: Mapping[str, Any], prefill_is_idle: bool = False
) -> None:
    """Let every data parallel rank of one read a prompt from every one of the other.

    That an instance answers ``/health`` says nothing about whether it can reach its peers, and that it answers a
    request says little: with the policy ``recompute`` it computes what it cannot fetch. So its counters are read. Where
    the decode instance serves others meanwhile they may count for those; then it must be seen that a prefill instance
    that `prefill_is_idle` otherwise does not hold the prompt any more, which it does until somebody has read it.

    Raises:
        StartError: nothing was moved, or one of them did not answer.
    """
    for turn in range(prefill.spec.layout.dp * decode.spec.layout.dp):
        chosen = ranks(turn, prefill.spec.layout.dp, decode.spec.layout.dp)
        problem = ""
        for _ in range(ATTEMPTS):
            try:
                problem = _move(dispatcher, prefill, decode, chosen, config)
                problem = problem or (_held(prefill) if prefill_is_idle else "")
            except DispatchError as error:
                problem = str(error)
            if not problem:
                break
        else:
            raise StartError(f"{prefill.name} and {decode.name} do not exchange KV caches: {problem}")


def _move(
    dispatcher: Dispatcher,
    prefill: Member,
    decode: Member,
    chosen: tuple[int | None, int | None],
    config: Mapping[str, Any],
) -> str:
    """Why the prompt was not moved, or ""."""
    before = Moved.read(decode.spec.url)
    legs = dispatcher.both_legs(prefill.spec.url, decode.spec.url, _prompt(config), Sampling(max_tokens=2), *chosen)
    end = time.monotonic() + SETTLE_S
    while True:
        after = Moved.read(decode.spec.url)
        if after.bytes > before.bytes:
            return ""
        if after.failures > before.failures:
            return f"a read failed; {decode.name}'s log says why"
        if not legs.prefill.kv_transfer_params:
            return f"{prefill.name} offered nothing"
        if time.monotonic() > end:
            return f"{decode.name} answered, but says that it read nothing from {prefill.name}"
        time.sleep(POLL_S)


def _held(prefill: Member) -> str:
    """Why it seems that nobody has read what the instance holds, or ""."""
    end = time.monotonic() + SETTLE_S
    with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client:
        while True:
            load = look(client, prefill.spec.url).load
            if load is not None and load.idle:
                return ""
            if time.monotonic() > end:
                return f"{prefill.name} still holds the prompt, so nobody has read it"
            time.sleep(POLL_S)


def _prompt(config: Mapping[str, Any]) -> list[int]:
    """One that nobody has in a cache."""
    vocabulary = min(int(config.get("vocab_size", 256)), TOKENS_BELOW)
    return [random.randrange(min(LOWEST_TOKEN, vocabulary - 1), vocabulary) for _ in range(PROBE_TOKENS)]
