"""The worker half: one per (pp_rank, tp_rank) process; it describes its cache, and hands orders to its reader."""

from __future__ import annotations

import json
import logging
import os
import queue
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.parallel_state import get_dcp_group, get_pcp_group, get_pp_group, get_tp_group

from kvferry.geometry import EngineLayout, Span, WorkerShards, left_out
from kvferry.protocol.identity import draw
from kvferry.protocol.loads import Order
from kvferry.protocol.subject import Subject
from kvferry.sidechannel.client import Client
from kvferry.transport.nixl import Agent
from kvferry.transport.reader import Deadlines, Outcome, Reader
from kvferry.vllm.cache_view import shards_by_layer
from kvferry.vllm.compat import fingerprint
from kvferry.vllm.metadata import Executed, Handshake, StepMetadata, Written
from kvferry.vllm.metrics import Tally, TransferStats
from kvferry.vllm.settings import Settings, read_seal
from kvferry.vllm.staging import Staging, mirrored
from kvferry.vllm.tracing import Headers, spans

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

TRANSFER_LOG = "KVFERRY_TRANSFER_LOG"
"""Names a file to which every finished load is appended as a line of JSON."""


MOST_LAYERS = 3
"""That are named in a log line."""

MAX_REASONS = 100
"""Reasons for failed loads that are remembered, so as to warn of each once."""


class WorkerHalf:
    """Hooks are called on the worker's main thread and never wait for a peer.

    Args:
        staged: move a copy of the cache in host memory, not the cache itself.
    """

    def __init__(
        self, config: VllmConfig, settings: Settings, kv_cache_config: KVCacheConfig, staged: bool = False
    ) -> None:
        self._config = config
        self._staged = staged
        self._staging: Staging | None = None
        self._written: list[Written] = []
        self._settings = settings
        self._seal = read_seal(settings)
        self._kv_cache_config = kv_cache_config
        self._pp_rank = get_pp_group().rank_in_group
        # Ranks of prefill context parallelism are workers of their own, numbered here as in vLLM's handshake.
        self._tp_rank = get_tp_group().rank_in_group + get_pcp_group().rank_in_group * get_tp_group().world_size
        self._reader: Reader | None = None
        self._client: Client | None = None
        self._handshake: Handshake | None = None
        self._released: set[str] = set()
        self._step: int | None = None
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._here = self._name = ""
        self._tally = Tally()
        self._traces: dict[str, Headers] = {}
        self._overdue = 0
        self._warned: set[str] = set()
        self._log_path = os.environ.get(TRANSFER_LOG)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Describe the cache and make it readable. vLLM may call again after it re-allocated the cache.

        Raises:
            UnsupportedError: a kind of cache that is not moved yet, or no host memory for a copy of it.
            TransferError: NIXL did not start or refused the memory.
        """
        self.shutdown()
        self._reader = self._staging = None  # with the host memory that they hold
        self._overdue = 0
        ranks = get_tp_group().rank_in_group, get_dcp_group().rank_in_group
        moved = mirrored(kv_caches) if self._staged else kv_caches
        layers = shards_by_layer(moved, self._kv_cache_config, self._config, *ranks)
        shards = tuple(shard for shards in layers.values() for shard in shards)
        layout = self._layout(shards)
        ended = self._ended
        if self._staged:
            self._staging = Staging(kv_caches, moved, layers)
            ended = partial(self._staged_in, self._staging, layout)
        self._here, self._name = layout.label, layout.workers[0].name
        self._client = Client("kvferry-acks", seal=self._seal)
        device = next(iter(kv_caches.values())).device
        self._reader = Reader(
            layout=layout,
            make_agent=self._make_agent,
            ask=self._client.send,
            on_outcome=ended,
            deadlines=Deadlines(
                self._settings.handshake_timeout,
                self._settings.read_timeout,
                self._settings.ack_timeout,
                self._settings.hold_timeout,
            ),
            on_start=lambda: _bind(device),
            on_contact=self._met,
        )
        metadata = self._reader.start()
        self._handshake = Handshake(WorkerShards(self._pp_rank, self._tp_rank, shards, metadata))

    def _layout(self, shards: tuple[Any, ...]) -> EngineLayout:
        parallel = self._config.parallel_config
        return EngineLayout(
            incarnation=draw(),
            tp=parallel.tensor_parallel_size,
            pp=parallel.pipeline_parallel_size,
            dp_rank=parallel.data_parallel_index,
            fingerprint=fingerprint(self._config, self._settings.model_id),
            workers=(WorkerShards(self._pp_rank, self._tp_rank, shards),),
        )

    def _make_agent(self) -> Agent:
        # A name of its own at every start: NIXL keeps what it knew of a name.
        return Agent(
            f"kvferry-{draw()}",
            progress_delay_us=self._settings.nixl_progress_delay_us,
            backend=self._settings.backends[0],
            backend_options=self._settings.backend_params,
        )

    def get_handshake_metadata(self) -> Handshake | None:
        return self._handshake

    def start_load_kv(self, metadata: StepMetadata) -> None:
        self._traces |= metadata.traces
        if metadata.sighted or metadata.loads:
            assert self._reader is not None, "vLLM registers the KV cache before the first step"
            for address, incarnation in metadata.sighted:
                self._reader.meet(address, incarnation)
            for order in metadata.loads:
                self._reader.submit(order)
        self._released.update(metadata.released)
        self._step = metadata.step
        self._written = metadata.written

    def stage_written(self) -> None:
        """Copy to host memory what the step has computed; once, and nothing without host staging."""
        written, self._written = self._written, []
        if self._staging:
            for one in written:
                self._staging.to_host(one.blocks, one.tokens)

    def take_executed(self) -> Executed | None:
        """What the scheduler half wanted to know of the step that ends."""
        step, self._step = self._step, None
        return None if step is None else Executed(step)

    def _met(self, seconds: float, producer: EngineLayout, left: list[str]) -> None:
        """On the transfer thread."""
        self._tally.add("first_contact", seconds)
        if not left:
            return
        self._tally.add("layers_left_out", len(left))
        logger.warning(
            "%d layers of the drafter are not loaded from %s, which does not have them: %s. The model's own are; "
            "until a drafter has seen its own tokens it guesses worse",
            *(len(left), producer.label, ", ".join(left[:MOST_LAYERS]) + (", ..." if len(left) > MOST_LAYERS else "")),
        )

    def _staged_in(self, staging: Staging, here: EngineLayout, outcome: Outcome) -> None:
        """On the transfer thread, so that no running request waits: nobody else uses the blocks of a load."""
        order, producer = outcome.order, outcome.producer
        if outcome.failure is None and producer is not None:
            began = time.perf_counter()
            try:
                tokens = Span(order.first_token, order.last_token)
                staging.to_device(order.local_blocks, tokens, left_out(producer, here))
            except Exception as error:
                logger.exception("what was loaded for %s could not be copied to the device", self._subject(order))
                outcome = replace(outcome, failure=f"it could not be copied to the device: {error}")
            seconds = time.perf_counter() - began
            phases = {**outcome.phases, "stage": seconds}
            outcome = replace(outcome, seconds=outcome.seconds + seconds, phases=phases)
        self._ended(outcome)

    def _ended(self, outcome: Outcome) -> None:
        """On the transfer thread."""
        self._outcomes.put(outcome)
        order = outcome.order
        headers = self._traces.pop(order.request, None)
        if headers:
            spans(headers, self._subject(order), outcome.phases, outcome.failure, worker=self._name)

    def _subject(self, order: Order) -> Subject:
        return Subject(order.request, self._here, order)

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """Everything that ended since the last call, each request once."""
        if self._written and not get_pp_group().is_last_rank:
            # Where the last stage has a drafter, vLLM asks that one only to save, and after this.
            self.stage_written()
        released, self._released = self._released, set()
        results = KVConnectorTransferResults(finished_sending=released)
        while not self._outcomes.empty():
            outcome = self._outcomes.get()
            request = outcome.order.request
            results.finished_recving.add(request)
            if outcome.failure:
                results.failed_recving.add(request)
                self._warn(outcome.order, outcome.failure)
            self._tally.record(outcome)
            self._log(outcome)
        return results

    def _warn(self, order: Order, failure: str) -> None:
        """An incompatible pair fails every request for the same reasons: they are worth one warning."""
        log = logger.info if failure in self._warned else logger.warning
        log("loading the KV cache of %s failed: %s", self._subject(order), failure)
        if len(self._warned) < MAX_REASONS:
            self._warned.add(failure)

    def take_stats(self) -> TransferStats | None:
        """Statistics since the last call, None when nothing happened."""
        if self._reader is not None and self._reader.overdue != self._overdue:
            self._tally.add("overdue_reads", self._reader.overdue - self._overdue)
            self._overdue = self._reader.overdue
        return self._tally.take()

    def _log(self, outcome: Outcome) -> None:
        if not self._log_path:
            return
        dp_rank = self._config.parallel_config.data_parallel_index
        producer_dp = outcome.producer.dp_rank if outcome.producer else None
        line = {
            "request": outcome.order.request,
            "incarnation": outcome.order.incarnation,
            "consumer": {"dp": dp_rank, "pp": self._pp_rank, "tp": self._tp_rank},
            "reads": [
                {
                    "producer": {"dp": producer_dp, "pp": part.worker.pp_rank, "tp": part.worker.tp_rank},
                    "bytes": part.bytes,
                    "descriptors": part.descriptors,
                }
                for part in outcome.reads
            ],
            "tokens": outcome.order.last_token - outcome.order.first_token,
            "ms": round(outcome.seconds * 1e3, 3),
            "result": outcome.failure or "held",
        }
        try:
            with open(self._log_path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            logger.warning("cannot write %s=%s: %s", TRANSFER_LOG, self._log_path, error)
            self._log_path = None

    def shutdown(self) -> None:
        """End the threads. Safe to call twice."""
        for part in (self._reader, self._client):
            if part is not None:
                part.close()


def _bind(device: torch.device) -> None:
    """UCX must find the device's context in the thread that uses it, or it loses the fast paths."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
