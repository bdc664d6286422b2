"""The KV connector vLLM loads by name: the scheduler half plans, the worker half runs blend passes.

It claims every prompt token but the last of a request that reuses stored chunks.  vLLM allocates
the blocks, and before its own forward the worker half fills them (`start_load_kv`).
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
from blendrag.runtime.compat import count_cached, hash_block_size, in_one_process, load_tokenizer
from blendrag.runtime.engine.scratch import Scratch, scratch_path
from blendrag.runtime.messages import AuditResult, BlendJob, BlendMetadata, BlendReport, BlendReports, ModelFacts
from blendrag.runtime.metrics import QualityMetrics, QualityStats
from blendrag.runtime.passes.auditor import Auditor
from blendrag.runtime.passes.blender import Blender
from blendrag.runtime.passes.encoder import Encoder
from blendrag.runtime.planning.audits import Audits
from blendrag.runtime.planning.locating import DocumentTokens
from blendrag.runtime.planning.marks import MARKS, delimiter_in, marks_of
from blendrag.runtime.planning.placing import Plan
from blendrag.runtime.planning.planner import Planner
from blendrag.runtime.planning.populator import Populator
from blendrag.runtime.planning.salt import salt_block_hashes
from blendrag.store import ChunkStore, open_store, prefix_digest
from blendrag.store.keys import NEUTRAL
from blendrag.tokens import SegmentTokenizer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_PASS_SHARE = 8
"""A pass computes about a prompt's eighth: where less is left, vLLM computes that as quickly, and exactly."""


class BlendConnector(KVConnectorBase_V1, SupportsHMA):
    """Blends stored chunks into prompts; see docs/design.md."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.config = BlendConfig(**self._kv_transfer_config.kv_connector_extra_config)
        # A pass that fails must cost time, not the request; vLLM reads this when the connector is made.
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        # Unlike the rest, this is known to all processes of an engine, and to no other engine.
        identity = str(self._kv_transfer_config.engine_id)
        path, disk_bytes = self.config.store_path, self.config.disk_bytes
        self._scratch: Scratch | None = None
        if path is None and not in_one_process(vllm_config):
            path, disk_bytes = scratch_path(identity), self.config.ram_bytes
            self._scratch = Scratch(path) if role is KVConnectorRole.SCHEDULER else None
        self.store: ChunkStore = open_store(
            path, self.config.ram_bytes, pin_memory=current_platform.is_cuda(), disk_bytes=disk_bytes, name=identity)
        self.planner = Planner(self.config, self.store)
        self.populator = Populator(
            lambda missing: self.planner.lookup.key(prefix_digest(()) if missing.is_prefix else NEUTRAL, missing.ids),
            self.planner.lookup.present)
        guard = self.config.quality_guard
        self.audits = Audits(guard, vllm_config.scheduler_config.max_num_batched_tokens) if guard is not None else None
        self.quality: list[dict[str, Any]] = []
        self.blender: Blender | None = None
        self.encoder: Encoder | None = None
        self.auditor: Auditor | None = None
        self._delimiter_ids: list[int] = []
        self._sink_ids: list[int] = []
        tokens: SegmentTokenizer | None = None
        if role is KVConnectorRole.SCHEDULER and (tokenizer := load_tokenizer(vllm_config.model_config)) is not None:
            tokens = SegmentTokenizer(tokenizer)
            self._delimiter_ids, self._sink_ids = delimiter_in(tokens, self.config.delimiter), tokens.sink_ids
        self._document_ids = DocumentTokens(tokens)
        self._block_pool: BlockPool | None = None
        self._plans: dict[str, Plan] = {}
        self._jobs: list[BlendJob] = []
        self._pending: dict[str, tuple[Plan, dict[str, Any]]] = {}
        self._reports: dict[str, BlendReport] = {}
        self._failed_blocks: set[int] = set()
        self._encoded = 0
        self._audited: list[AuditResult] = []
        self._shut_down = False

    # Scheduler half.

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        facts = metadata[0]
        assert isinstance(facts, ModelFacts)
        self.planner.know(facts)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._block_pool = gpu_block_pool

    def on_new_request(self, request: Request) -> None:
        marks = marks_of(request, self._delimiter_ids)
        if marks is None:
            return
        plan = self.planner.plan(request, marks.spans, marks.policy, self._document_ids(marks.documents))
        if plan is None:
            return
        plan.explain = marks.explain
        self._plans[request.request_id] = plan
        if plan.placements and self.audits is not None and (ladder := self.audits.admit(request, plan)) is not None:
            self.planner.follow(plan, ladder)
        if plan.placements:
            block_size = hash_block_size(self._vllm_config, self._kv_cache_config)
            salt_block_hashes(request, plan.exact_tokens, block_size, plan.salt)
        if plan.missing and self.config.populate == "on_miss" and self._sink_ids:
            self.populator.add(request, plan.missing)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        plan = self._plans.get(request.request_id)
        if plan is None:
            return 0, False
        if not request.num_preemptions:
            plan.stats.prefix_cached_tokens = num_computed_tokens
        useful = any(p.end > num_computed_tokens for p in plan.placements)
        # A hit that reaches into blended blocks is this same prompt again.  What is left is a block at the most, unless
        # the prompt's last blocks had to make room: they are blended again.
        left = plan.stats.prompt_tokens - num_computed_tokens
        block_size = self._vllm_config.cache_config.block_size
        little = left <= max(block_size, plan.stats.prompt_tokens // _PASS_SHARE)
        if not useful or (num_computed_tokens > plan.exact_tokens and little):
            return 0, False
        plan.declined = not self.planner.worth(plan, num_computed_tokens)
        return (0 if plan.declined else max(0, left - 1)), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        plan = self._plans.get(request.request_id)
        if plan is None or num_external_tokens == 0:
            return
        plan.prefill = request.prefill_stats
        self._jobs.append(BlendJob(
            request_id=request.request_id, token_ids=plan.ids[:-1], placements=plan.placements,
            question_start=plan.question_start, policy=plan.policy.settings(),
            write_from=len(plan.ids) - 1 - num_external_tokens, block_ids=blocks.get_block_ids(),
            resumed=request.num_preemptions > 0, explain=plan.explain))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        jobs, self._jobs = self._jobs, []
        metadata = BlendMetadata(jobs, self.populator.take(scheduler_output), self._sink_ids)
        if self.audits is not None:
            metadata.audits = [] if metadata.encode else self.audits.take(scheduler_output)
            metadata.quality = self.audits.news("worker")
        return metadata

    def has_pending_push_work(self) -> bool:
        return self.populator.pending or (self.audits is not None and self.audits.pending)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        found = connector_output.kv_connector_worker_meta
        if not isinstance(found, BlendReports):
            return
        if found.encoded:
            self.populator.done()
        if found.audits and self.audits is not None:
            self.audits.done(found.audits)
        for request_id, report in found.reports.items():
            if report.unwritten and self._block_pool is not None:
                # vLLM computes them again, step by step, but goes on offering them to others meanwhile.
                self._block_pool.evict_blocks(set(report.unwritten))
            if report.resumed and not report.failure:
                continue  # the statistics are of the first time
            if request_id in self._plans:
                self._reports[request_id] = report
                count_cached(self._plans[request_id].prefill, report.reused)
            elif request_id in self._pending:
                # The request finished in this very step: complete what was handed out.
                plan, handed_out = self._pending[request_id]
                handed_out[MARKS] = self.planner.conclude(plan, report).to_dict()
                count_cached(plan.prefill, report.reused)
        self._pending.clear()

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        plan = self._plans.pop(request.request_id, None)
        if plan is None:
            return False, None
        report = self._reports.pop(request.request_id, None)
        handed_out: dict[str, Any] = {}
        if report is None:
            # Worker reports are read after requests finish, within the same update, and vLLM sends the mapping on
            # later still: it can be completed until then.
            self._pending[request.request_id] = (plan, handed_out)
        handed_out[MARKS] = self.planner.conclude(plan, report).to_dict()
        return False, handed_out

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        news = self.audits.news("metrics") if self.audits is not None else None
        return QualityStats({"policies": news}) if news is not None else None

    # Front end.

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return QualityStats(data or {})

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str],
                           per_engine_labelvalues: dict[int, list[object]]) -> KVConnectorPromMetrics | None:
        settings = vllm_config.kv_transfer_config.kv_connector_extra_config
        if BlendConfig(**settings).quality_guard is None:
            return None
        return QualityMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Worker half.

    def attach(self, blender: Blender, encoder: Encoder) -> None:
        """Gives the worker half the model; called by the worker once it is loaded."""
        self.blender, self.encoder, self.auditor = blender, encoder, Auditor(blender)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        if self.blender is None:
            return None
        entries = self.blender.entries
        return ModelFacts(entries.fingerprint, len(self.blender.model.layers), entries.ranks.size)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, BlendMetadata)
        if metadata.quality is not None:
            self.quality = metadata.quality
        if not metadata.jobs and not metadata.encode and not metadata.audits:
            return
        assert self.blender is not None, "the engine must run with worker_cls=blendrag.runtime.worker.BlendWorker"
        assert self.encoder is not None
        if metadata.encode:
            self.encoder.populate(metadata.encode, metadata.sink_ids)
            self._encoded += len(metadata.encode)
        if metadata.audits:
            assert self.auditor is not None
            self._audited += self.auditor.audit(metadata.audits)
        if not metadata.jobs:
            return
        for job, report in zip(metadata.jobs, self.blender.blend(metadata.jobs), strict=True):
            report.resumed = job.resumed
            self._reports[job.request_id] = report
            if report.failure:
                logger.warning("the blend pass of request %s failed, prefilling in full: %s", job.request_id,
                               report.failure)
                self._failed_blocks.update(report.unwritten)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        reports, self._reports = self._reports, {}
        encoded, self._encoded = self._encoded, 0
        audited, self._audited = self._audited, []
        return BlendReports(reports, encoded, audited) if reports or encoded or audited else None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a blend pass is complete when `start_load_kv` returns."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to save: chunks are encoded by passes of their own."""

    def wait_for_save(self) -> None:
        """Nothing to save."""

    def shutdown(self) -> None:
        self.blender = self.encoder = self.auditor = None
        if not self._shut_down:
            self._shut_down = True
            self.store.close()
            if self._scratch is not None:
                self._scratch.close()
