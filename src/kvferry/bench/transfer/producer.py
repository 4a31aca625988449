"""Run as a process: workers of a producer, which is memory and the NIXL agents to read it through."""

from dataclasses import replace

from kvferry.bench.transfer.cache import Cache
from kvferry.bench.transfer.remote import Role, run
from kvferry.geometry import WorkerShards, memory_regions
from kvferry.protocol.identity import draw
from kvferry.transport.nixl import Agent


class Producer(Role):
    """In this process as in an engine's worker, except that there may be several.

    Args:
        workers: what they hold, at addresses that are made up.
        reserve: fill nothing: the caches are larger than the memory.
    """

    def __init__(self, workers: list[WorkerShards], reserve: bool = False) -> None:
        self._caches = [Cache(worker, reserve) for worker in workers]
        self._agents = [Agent(f"kvferry-bench-{draw()}") for _ in workers]
        for cache, agent in zip(self._caches, self._agents, strict=True):
            if not reserve:
                cache.fill()
            agent.register(memory_regions(cache.worker.shards))

    def workers(self) -> list[WorkerShards]:
        """What they publish."""
        both = zip(self._caches, self._agents, strict=True)
        return [replace(cache.worker, agent=agent.metadata()) for cache, agent in both]


if __name__ == "__main__":
    run(Producer)
