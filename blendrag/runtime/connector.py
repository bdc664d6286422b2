"""The KV connector vLLM loads by name: the scheduler half plans, the worker half runs blend passes.

It claims every prompt token but the last of a request that reuses stored chunks.  vLLM allocates
the blocks, and before its own forward the worker half fills them (`start_load_kv`).
"""

from __future__ import annotations

import logging
from itertools import chain
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

from blendrag.blend_params import BLEND_PARAMS_KEY
from blendrag.config import BlendConfig
from blendrag.errors import StoreError
from blendrag.runtime.compat import (
    count_cached,
    hash_block_size,
    in_one_process,
    is_beam_step,
    load_tokenizer,
    prefix_cached,
    sampled_from,
)
from blendrag.runtime.engine.connectors import check_worker
from blendrag.runtime.engine.scratch import Scratch, scratch_folder
from blendrag.runtime.fingerprint import fingerprint_of
from blendrag.runtime.messages import (
    AuditResult,
    BlendJob,
    BlendMetadata,
    BlendReport,
    BlendReports,
    EncodeReport,
    ModelFacts,
)
from blendrag.runtime.metrics import QualityMetrics, QualityStats
from blendrag.runtime.passes.auditor import Auditor
from blendrag.runtime.passes.blender import Blender
from blendrag.runtime.passes.encoder import Encoder
from blendrag.runtime.passes.populating import Populating
from blendrag.runtime.planning.audits import Audits
from blendrag.runtime.planning.locating import DocumentTokens, as_ids
from blendrag.runtime.planning.marks import delimiter_in, parse_blend_params
from blendrag.runtime.planning.placing import Plan
from blendrag.runtime.planning.planner import Planner
from blendrag.runtime.planning.populator import Populator
from blendrag.runtime.planning.salt import salt_block_hashes
from blendrag.runtime.planning.siblings import Siblings
from blendrag.store import ChunkStore, open_store, prefix_digest
from blendrag.store.keys import NEUTRAL
from blendrag.tenants import load_tenants
from blendrag.tokens import SegmentTokenizer

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

_PASS_SHARE = 8
"""A pass computes about a prompt's eighth: where less is left, vLLM computes that as quickly, and exactly."""


class BlendConnector(KVConnectorBase_V1, SupportsHMA):
    """Blends stored chunks into prompts; see docs/design.md."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_worker(vllm_config)
        self.config = BlendConfig(**self._kv_transfer_config.kv_connector_extra_config)
        # A pass that fails must cost time, not the request; vLLM reads this when the connector is made.
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        # Unlike the rest, this is known to all processes of an engine, and to no other engine.
        identity = str(self._kv_transfer_config.engine_id)
        self.fingerprint = fingerprint_of(identity)
        self._apart = not in_one_process(vllm_config)
        self._generation_sent = self._model_sent = ""
        path, disk_bytes = self.config.store_path, self.config.disk_bytes
        self._scratch: Scratch | None = None
        if path is None and self._apart:
            path, disk_bytes = scratch_folder(identity), self.config.ram_bytes
            self._scratch = Scratch(path) if role is KVConnectorRole.SCHEDULER else None
        self.store: ChunkStore = open_store(
            path, self.config.ram_bytes, pin_memory=current_platform.is_cuda(), disk_bytes=disk_bytes, name=identity,
            quotas=_disk_quotas(self.config))
        self._populates = self.config.populate == "on_miss"
        if self.store.read_only and self._populates:
            self._populates = False
            logger.warning("the store %s cannot be written to: populate=on_miss stores nothing there", path)
        self.planner = Planner(self.config, self.store)
        guard = self.config.quality_guard
        self.audits = Audits(guard, vllm_config.scheduler_config.max_num_batched_tokens) if guard is not None else None
        self.quality: list[dict[str, Any]] = []
        self.blender: Blender | None = None
        self.encoder: Encoder | None = None
        self.auditor: Auditor | None = None
        self.populating: Populating | None = None
        self._delimiter_ids: list[int] = []
        self._sink_ids: list[int] = []
        tokens: SegmentTokenizer | None = None
        if role is KVConnectorRole.SCHEDULER and (tokenizer := load_tokenizer(vllm_config.model_config)) is not None:
            tokens = SegmentTokenizer(tokenizer)
            self._sink_ids = tokens.sink_ids
            if self.config.delimiter is not None:
                self._delimiter_ids = delimiter_in(tokens, self.config.delimiter)
        self._document_ids = DocumentTokens(tokens)
        self.populator = Populator(
            lambda missing: self.planner.lookup.key(
                missing.scope, prefix_digest(()) if missing.is_prefix else NEUTRAL, missing.ids),
            self.planner.lookup.present, vllm_config.model_config.max_model_len - len(self._sink_ids),
            self.config.populate_step_tokens, self.config.populate_queue_tokens)
        self._block_pool: BlockPool | None = None
        self._cache_manager: KVCacheManager | None = None
        self._plans: dict[str, Plan] = {}
        self._jobs: list[BlendJob] = []
        self._pending: dict[str, tuple[Plan, dict[str, Any]]] = {}
        self._reports: dict[str, BlendReport] = {}
        self._siblings = Siblings()
        self._uncounted: list[Any] = []
        self._failed_blocks: set[int] = set()
        self._encoded: EncodeReport | None = None
        self._audited: list[AuditResult] = []
        self._shut_down = False

    # Scheduler half.

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        facts = metadata[0]
        assert isinstance(facts, ModelFacts)
        self.planner.know(facts)
        if self._apart:
            self.fingerprint.start(facts.fingerprint)
        self.fingerprint.subscribe(self._leave)
        if self.audits is not None:
            self.audits.monitor.default = self.planner.default

    def _leave(self, fingerprint: str) -> None:
        """Plans with the entries of another fingerprint from now on.

        What no other engine finds of those before is deleted, the rest leaves this engine's memory.
        """
        before, self.planner.lookup.facts.fingerprint = self.planner.lookup.facts.fingerprint, fingerprint
        try:
            if self.config.store_path is None or before != self.fingerprint.at_start:
                self.store.clear(fingerprint=before)
            else:
                self.store.free(before)
        except StoreError as error:
            logger.warning("what was stored under an earlier fingerprint could not be deleted: %s", error)

    def reset_cache(self) -> bool:
        """Finds nothing again that is stored now; called for `reset_prefix_cache(reset_connector=True)`.

        Engines that share the disk store keep what they have.
        """
        self.fingerprint.reset()
        return True

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._block_pool = gpu_block_pool

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        self._cache_manager = kv_cache_manager
        self.bind_gpu_block_pool(kv_cache_manager.block_pool)

    def on_new_request(self, request: Request) -> None:
        if is_beam_step(request):
            return
        params = parse_blend_params(request, self._delimiter_ids)
        if params is None:
            return
        marks = params.spans, params.documents, params.document_ids
        count = sum(len(some) for some in marks if isinstance(some, (list, tuple)))
        if count > self.config.max_documents:
            logger.warning("request %s names %d documents and spans, max_documents allows %d: prefilling in full",
                           request.request_id, count, self.config.max_documents)
            return
        documents = chain(map(as_ids, params.document_ids),
                          self._document_ids(params.documents, request.prompt_token_ids or []))
        plan = self.planner.plan(request, params.spans, params.policy, documents)
        if plan is None:
            return
        plan.explain = params.explain and self.config.statistics == "chunks"
        plan.fingerprint = self.fingerprint.value
        self._plans[request.request_id] = plan
        block_size = hash_block_size(self._vllm_config, self._kv_cache_config)
        if plan.placements:
            # What is cached and exact is found under the plain hashes only.
            self.planner.prefer_exact(plan, prefix_cached(request, self._cache_manager, self._block_pool,
                                                          self._kv_cache_config, block_size))
        if plan.placements and self.audits is not None and (ladder := self.audits.admit(request, plan)) is not None:
            self.planner.follow(plan, ladder)
        if plan.placements and plan.salt:
            salt_block_hashes(request, plan.exact_tokens, block_size, plan.salt)
        if plan.missing and self._populates and self._sink_ids:
            self.populator.add(request, plan.missing)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        plan = self._plans.get(request.request_id)
        if plan is None:
            return 0, False
        if not request.num_preemptions:
            plan.stats.prefix_cached_tokens = num_computed_tokens
        if plan.fingerprint != self.fingerprint.value:
            plan.outdated = not request.num_preemptions  # the statistics are of the first time
            return 0, False
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
        if self.config.statistics == "none":
            self._uncounted.append(request.prefill_stats)
        plan = self._plans.get(request.request_id)
        if plan is None or num_external_tokens == 0:
            return
        plan.prefill = request.prefill_stats
        self._jobs.append(BlendJob(
            request_id=request.request_id, token_ids=plan.ids[:-1], placements=plan.placements,
            question_start=plan.question_start, policy=plan.policy,
            write_from=len(plan.ids) - 1 - num_external_tokens, block_ids=blocks.get_block_ids(),
            resumed=request.num_preemptions > 0, explain=plan.explain, fingerprint=plan.fingerprint))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        for prefill_stats in self._uncounted:  # vLLM has counted what its own prefix cache held
            count_cached(prefill_stats, 0)
        self._uncounted.clear()
        jobs, self._jobs = self._jobs, []
        metadata = BlendMetadata(jobs, *self.populator.take(scheduler_output), self._sink_ids,
                                 generation=self.fingerprint.generation)
        self._generation_sent = self.fingerprint.generation
        if self.audits is not None:
            if not metadata.encode_rows:
                metadata.audits, metadata.audit_rows = self.audits.take(scheduler_output)
            metadata.quality = self.audits.news("worker")
        return metadata

    def has_pending_push_work(self) -> bool:
        unsent = self._apart and self._generation_sent != self.fingerprint.generation
        return unsent or self.populator.pending or (self.audits is not None and self.audits.pending)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        found = connector_output.kv_connector_worker_meta
        if not isinstance(found, BlendReports):
            return
        if found.model:
            self.fingerprint.change(model=found.model)
        if found.encoded is not None:
            self.populator.done(found.encoded)
        if found.audits and self.audits is not None:
            self.audits.done(found.audits)
        for request_id, report in found.reports.items():
            if report.unwritten and self._block_pool is not None:
                # vLLM computes them again, step by step, but goes on offering them to others meanwhile.
                self._block_pool.evict_blocks(set(report.unwritten))
            if report.resumed and not report.failure:
                continue  # the statistics are of the first time
            if request_id in self._plans:
                plan = self._plans[request_id]
                self._reports[request_id] = report
            elif request_id in self._pending:
                # The request finished in this very step: complete what was handed out.
                plan, handed_out = self._pending[request_id]
                handed_out |= self._statistics(plan, report)
            else:
                continue
            self._count(plan.prefill, report.reused)
            if sampled_from(request_id) is not None:
                self._siblings.add(request_id, self._statistics(plan, report))
        for request_id, (_, handed_out) in self._pending.items():
            handed_out |= self._siblings.of(request_id) or {}
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
        handed_out |= self._siblings.of(request.request_id) or self._statistics(plan, report)
        return False, handed_out or None

    def _statistics(self, plan: Plan, report: BlendReport | None) -> dict[str, Any]:
        """What a request's answer says of it, as far as the settings allow."""
        if self.config.statistics == "none":
            return {}
        values = self.planner.conclude(plan, report).to_dict()
        if self.config.statistics == "totals":
            del values["chunks"]
        return {BLEND_PARAMS_KEY: values}

    def _count(self, prefill_stats: Any, tokens: int) -> None:
        count_cached(prefill_stats, tokens if self.config.statistics != "none" else 0)

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
        self.populating = populating = Populating(encoder)
        self.fingerprint.start(blender.entries.fingerprint)
        self.fingerprint.subscribe(lambda _: populating.abandon())
        self.fingerprint.subscribe(blender.entries.rename)
        self._model_sent = self.fingerprint.model

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        if self.blender is None:
            return None
        entries = self.blender.entries
        return ModelFacts(entries.fingerprint, len(self.blender.model.layers), entries.ranks.size)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, BlendMetadata)
        if self._apart:
            self.fingerprint.change(generation=metadata.generation)
        if metadata.quality is not None:
            self.quality = metadata.quality
        if not metadata.jobs and not metadata.encode_rows and not metadata.audit_rows:
            return
        assert self.blender is not None, "the engine must run with worker_cls=blendrag.runtime.worker.BlendWorker"
        if metadata.encode_rows:
            assert self.populating is not None
            self._encoded = self.populating.advance(metadata.encode, metadata.sink_ids, metadata.encode_rows)
        if metadata.audit_rows:
            assert self.auditor is not None
            self._audited += self.auditor.advance(metadata.audits, metadata.audit_rows)
        if not metadata.jobs:
            return
        for job in metadata.jobs:
            if job.fingerprint != self.fingerprint.value:
                job.placements = []  # the pass computes all rows
        for job, report in zip(metadata.jobs, self.blender.blend(metadata.jobs), strict=True):
            report.resumed = job.resumed
            report.outdated = job.fingerprint != self.fingerprint.value
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
        encoded, self._encoded = self._encoded, None
        audited, self._audited = self._audited, []
        model = self.fingerprint.model if self._apart and self.fingerprint.model != self._model_sent else ""
        self._model_sent = self.fingerprint.model
        if not reports and encoded is None and not audited and not model:
            return None
        return BlendReports(reports, encoded, audited, model)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a blend pass is complete when `start_load_kv` returns."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to save: chunks are encoded by passes of their own."""

    def wait_for_save(self) -> None:
        """Nothing to save."""

    def shutdown(self) -> None:
        if self.populating is not None:
            self.populating.close()
        self.blender = self.encoder = self.auditor = self.populating = None
        if not self._shut_down:
            self._shut_down = True
            if self.role is KVConnectorRole.SCHEDULER and self.fingerprint.own:
                self._leave("")
            self.fingerprint.close()
            self.store.close()
            if self._scratch is not None:
                self._scratch.close()


def _disk_quotas(config: BlendConfig) -> dict[str, int]:
    """What the files of each tenant's chunks may have, in bytes, by namespace."""
    tenants = load_tenants(config.tenants) if config.tenants is not None else ()
    return {tenant.namespace: int(tenant.disk_bytes) for tenant in tenants if tenant.disk_bytes is not None}
