"""``KVFerryConnector``: the class vLLM loads. Importing this opens no socket, starts no thread, imports no NIXL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import vllm

from kvferry.vllm.versions import require_version

require_version(vllm.__version__)  # before anything is imported that another vLLM may not have

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvferry.vllm.compat import require_supported, staged
from kvferry.vllm.continuation import continuation
from kvferry.vllm.logs import join_vllm_logging
from kvferry.vllm.metadata import StepMetadata
from kvferry.vllm.metrics import TransferMetrics, TransferStats
from kvferry.vllm.settings import parse_settings

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # vLLM before the release that tells cache tiers apart
    CacheHitSource = None  # type: ignore[assignment, misc]

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvferry.vllm.scheduler import SchedulerHalf
    from kvferry.vllm.worker import WorkerHalf


class KVFerryConnector(KVConnectorBase_V1, SupportsHMA):
    """Pulls KV caches from any layout into any layout.

    Every hook goes to one of two halves, which vLLM builds in different processes; see ``kvferry.vllm.scheduler`` and
    ``kvferry.vllm.worker``.

    Raises:
        UnsupportedError: this vLLM, or something about this engine, is not supported.
        SettingsError: ``kv_connector_extra_config`` is not what ``Settings`` describes.
    """

    if CacheHitSource is not None:
        _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        join_vllm_logging()
        require_supported(vllm_config, kv_cache_config)
        settings = parse_settings(self._kv_transfer_config.kv_connector_extra_config)
        self._scheduler: SchedulerHalf
        self._worker: WorkerHalf
        if role is KVConnectorRole.SCHEDULER:
            from kvferry.vllm.scheduler import SchedulerHalf

            self._scheduler = SchedulerHalf(
                vllm_config,
                settings,
                continuation=continuation(vllm_config, kv_cache_config),
                staged=staged(vllm_config),
            )
        else:
            from kvferry.vllm.worker import WorkerHalf

            self._worker = WorkerHalf(vllm_config, settings, kv_cache_config, staged(vllm_config))

    # Scheduler half

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self._scheduler.set_workers({(0, tp_rank): value for tp_rank, value in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self._scheduler.set_workers(metadata)

    def on_new_request(self, request: Request) -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        output = connector_output
        self._scheduler.update_connector_output(
            output.finished_recving, output.failed_recving, output.kv_connector_worker_meta
        )

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request, block_ids)

    # Worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._worker.get_handshake_metadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        if isinstance(metadata, StepMetadata):
            self._worker.start_load_kv(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are complete before a request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Consumers read; producers do nothing."""

    def wait_for_save(self) -> None:
        self._worker.stage_written()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._worker.get_transfer_results()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self._worker.get_transfer_results()
        return results.finished_sending, results.finished_recving

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.take_executed()

    # Both

    def get_kv_connector_stats(self) -> TransferStats | None:
        half = self._scheduler if self.role is KVConnectorRole.SCHEDULER else self._worker
        return half.take_stats()

    def shutdown(self) -> None:
        half = self._scheduler if self.role is KVConnectorRole.SCHEDULER else self._worker
        half.shutdown()

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Not until caches that move in memory are registered anew with every peer."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Heads outermost within a block, so that a head range is one run of bytes. A wish: any layout works.

        By the name that vLLM's own connectors use: MultiConnector takes another name for another layout.
        """
        model = vllm_config.model_config
        return None if model is None or model.use_mla else "LBHNC"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats:
        # For the log line, which has nothing to say of a layout: an interval in which only that was told is empty.
        return TransferStats({key: series for key, series in (data or {}).items() if key != "layout"})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TransferMetrics:
        return TransferMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
