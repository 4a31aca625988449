"""Counters of an instance, read from its ``/metrics``."""

import re
from dataclasses import dataclass
from typing import Self

import httpx

from kvferry.errors import DispatchError

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{.*\})? (?P<value>\S+)", re.MULTILINE)
TIMEOUT_S = 10.0


@dataclass(frozen=True)
class PrefixHits:
    """Prompt tokens that an instance did not have to compute, summed over its engine cores.

    `local` were in its own prefix cache; `external` were admitted to come through its connector.
    """

    local: int
    external: int

    @classmethod
    def read(cls, url: str) -> Self:
        """Raises:
        DispatchError: the instance does not answer.
        """
        try:
            text = httpx.get(f"{url}/metrics", timeout=TIMEOUT_S, trust_env=False).raise_for_status().text
        except httpx.HTTPError as error:
            raise DispatchError(f"{url}/metrics cannot be read: {error}") from error
        return cls.parse(text)

    @classmethod
    def parse(cls, text: str) -> Self:
        """From the text of ``/metrics``."""
        return cls(total(text, "vllm:prefix_cache_hits"), total(text, "vllm:external_prefix_cache_hits"))

    def since(self, before: "PrefixHits") -> "PrefixHits":
        return PrefixHits(self.local - before.local, self.external - before.external)


NO_HITS = PrefixHits(0, 0)


def total(text: str, counter: str) -> int:
    """The sum of a counter's samples, whatever their labels."""
    names = {counter, f"{counter}_total"}
    return int(sum(float(sample["value"]) for sample in _SAMPLE.finditer(text) if sample["name"] in names))
