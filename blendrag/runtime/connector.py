"""The KV connector that vLLM loads by name.

vLLM makes one in the scheduler's process and one in each worker, which share nothing but the messages of a step.  Each
hook is passed on to the side that it belongs to.  A request that reuses stored chunks loads its KV asynchronously, as
if it came over a network: vLLM allocates the blocks and goes on stepping, the worker side fills them
(`blendrag.runtime.passes.pass_queue`), and then vLLM computes the prompt's last token.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.platforms import current_platform

from blendrag.config import BlendConfig
from blendrag.runtime.compat import in_one_process, transfer_results
from blendrag.runtime.engine.connectors import check_worker
from blendrag.runtime.engine.scratch import Scratch, scratch_folder
from blendrag.runtime.fingerprint import fingerprint_of
from blendrag.runtime.messages import BlendMetadata, ModelFacts
from blendrag.runtime.metrics import ConnectorMetrics, ConnectorStats
from blendrag.runtime.passes.blender import Blender
from blendrag.runtime.passes.encoder import Encoder
from blendrag.runtime.passes.worker_side import BlendConnectorWorker
from blendrag.runtime.planning.scheduler_side import BlendConnectorScheduler
from blendrag.store import ChunkStore, open_store
from blendrag.tenants import load_tenants

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class BlendConnector(KVConnectorBase_V1, SupportsHMA):
    """Blends stored chunks into prompts; see docs/design.md.

    Attributes:
        scheduler: None in a worker's connector.
        worker: None in the scheduler's connector.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_worker(vllm_config)
        self.config = BlendConfig(**self._kv_transfer_config.kv_connector_extra_config)
        # A pass that fails must cost time, not the request; vLLM reads this when the connector is made.
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        # Unlike the rest, this is known to all processes of an engine, and to no other engine.
        identity = str(self._kv_transfer_config.engine_id)
        self.fingerprint = fingerprint_of(identity)
        apart = not in_one_process(vllm_config)
        path, disk_bytes = self.config.store_path, self.config.disk_bytes
        self._scratch: Scratch | None = None
        if path is None and apart:
            path, disk_bytes = scratch_folder(identity), self.config.ram_bytes
            self._scratch = Scratch(path) if role is KVConnectorRole.SCHEDULER else None
        self.store: ChunkStore = open_store(
            path, self.config.ram_bytes, pin_memory=current_platform.is_cuda(), disk_bytes=disk_bytes, name=identity,
            quotas=_disk_quotas(self.config))
        self._open = True
        self.scheduler: BlendConnectorScheduler | None = None
        self.worker: BlendConnectorWorker | None = None
        if role is KVConnectorRole.SCHEDULER:
            self.scheduler = BlendConnectorScheduler(vllm_config, kv_cache_config, self.config, self.store,
                                                     self.fingerprint, apart)
        else:
            self.worker = BlendConnectorWorker(self.fingerprint, apart)

    @property
    def _planning(self) -> BlendConnectorScheduler:
        assert self.scheduler is not None, "a hook of the scheduler's connector"
        return self.scheduler

    @property
    def _passes(self) -> BlendConnectorWorker:
        assert self.worker is not None, "a hook of a worker's connector"
        return self.worker

    # Scheduler side.

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        facts = metadata[0]
        assert isinstance(facts, ModelFacts)
        self._planning.start(facts)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._planning.block_pool = gpu_block_pool

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        self._planning.cache_manager = kv_cache_manager
        self._planning.block_pool = kv_cache_manager.block_pool

    def reset_cache(self) -> bool:
        """Called for `reset_prefix_cache(reset_connector=True)`.  Nothing that is stored now is reused again.

        Engines that share the disk store keep what they have.
        """
        self.fingerprint.reset()
        return True

    def on_new_request(self, request: Request) -> None:
        self._planning.add(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self._planning.tokens_to_load(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._planning.allocate(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._planning.build(scheduler_output)

    def has_pending_push_work(self) -> bool:
        return self._planning.pending

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._planning.update(connector_output.kv_connector_worker_meta)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._planning.finish(request)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        news = self.scheduler.news() if self.scheduler is not None else None
        return ConnectorStats(news) if news else None

    # Front end.

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return ConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str],
                           per_engine_labelvalues: dict[int, list[object]]) -> KVConnectorPromMetrics | None:
        settings = vllm_config.kv_transfer_config.kv_connector_extra_config
        guard = BlendConfig(**settings).quality_guard is not None
        return ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues, guard)

    # Worker side.

    def attach(self, blender: Blender, encoder: Encoder) -> None:
        """Gives the worker side the model; called by the worker once it is loaded."""
        self._passes.attach(blender, encoder)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._passes.facts()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, BlendMetadata)
        self._passes.step(metadata)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._passes.take_finished(finished_req_ids)[0]

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        return transfer_results(*self._passes.take_finished(finished_req_ids))

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._passes.take_unwritten_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._passes.take_reports()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: what a request loads is complete when it is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to save: chunks are encoded by passes of their own."""

    def wait_for_save(self) -> None:
        """Nothing to save."""

    def shutdown(self) -> None:
        if not self._open:
            return
        self._open = False
        if self.worker is not None:
            self.worker.shutdown()
        if self.scheduler is not None:
            self.scheduler.shutdown()
        self.fingerprint.close()
        self.store.close()
        if self._scratch is not None:
            self._scratch.close()


def _disk_quotas(config: BlendConfig) -> dict[str, int]:
    """What the files of each tenant's chunks may have, in bytes, by namespace."""
    tenants = load_tenants(config.tenants) if config.tenants is not None else ()
    return {tenant.namespace: int(tenant.disk_bytes) for tenant in tenants if tenant.disk_bytes is not None}
