"""The scheduler side of the connector: plans requests, hands out work in each step, and accounts for it."""

from __future__ import annotations

import logging
from itertools import chain
from typing import TYPE_CHECKING, Any

from blendrag.blend_params import BLEND_PARAMS_KEY
from blendrag.config import BlendConfig
from blendrag.errors import StoreError
from blendrag.guard.ladder import Level
from blendrag.runtime.compat import (
    count_cached,
    hash_block_size,
    is_beam_step,
    load_tokenizer,
    prefix_cached,
    sampled_from,
)
from blendrag.runtime.fingerprint import Fingerprint
from blendrag.runtime.messages import BlendJob, BlendMetadata, BlendReport, BlendReports, ModelFacts
from blendrag.runtime.planning.audits import Audits
from blendrag.runtime.planning.beginnings import Beginnings, kind_of
from blendrag.runtime.planning.gate import Gate
from blendrag.runtime.planning.locating import DocumentTokens, as_ids
from blendrag.runtime.planning.marks import delimiter_in, parse_blend_params
from blendrag.runtime.planning.placing import Plan
from blendrag.runtime.planning.planner import Planner
from blendrag.runtime.planning.populator import Populator
from blendrag.runtime.planning.request_counts import RequestCounts
from blendrag.runtime.planning.salt import Salts, salt_block_hashes, salted, salts_behind
from blendrag.runtime.planning.siblings import Siblings
from blendrag.runtime.planning.step_load import PassBudget, StepLoad
from blendrag.stats import BlendStats
from blendrag.store import ChunkStore, prefix_digest
from blendrag.store.keys import NEUTRAL
from blendrag.tokens import SegmentTokenizer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_PASS_SHARE = 8
"""A pass computes about a prompt's eighth: where less is left, vLLM computes that as quickly, and exactly."""


class BlendConnectorScheduler:
    """What the scheduler's `BlendConnector` does.

    Args:
        fingerprint: what entries are named after.
        apart: the worker is in another process.

    Attributes:
        block_pool, cache_manager: vLLM's; None until it hands them over, and the latter in versions that do not.
    """

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: BlendConfig,
                 store: ChunkStore, fingerprint: Fingerprint, apart: bool) -> None:
        self.config = config
        self.block_pool: BlockPool | None = None
        self.cache_manager: KVCacheManager | None = None
        self._kv_cache_config = kv_cache_config
        self._block_size: int = vllm_config.cache_config.block_size
        self._hash_block_size = hash_block_size(vllm_config, kv_cache_config)
        self._store = store
        self._fingerprint = fingerprint
        self._apart = apart
        self._generation_sent = ""
        self._populates = config.populate == "on_miss"
        if store.read_only and self._populates:
            self._populates = False
            logger.warning("the store %s cannot be written to: populate=on_miss stores nothing there",
                           config.store_path)
        batch_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.planner = Planner(config, store)
        self.audits = Audits(config.quality_guard, batch_tokens) if config.quality_guard is not None else None
        tokenizer = load_tokenizer(vllm_config.model_config)
        tokens = SegmentTokenizer(tokenizer) if tokenizer is not None else None
        self._sink_ids = tokens.sink_ids if tokens is not None else []
        self._delimiter_ids = (delimiter_in(tokens, config.delimiter)
                               if tokens is not None and config.delimiter is not None else [])
        self._document_ids = DocumentTokens(tokens)
        self.populator = Populator(
            lambda missing: self.planner.lookup.key(
                missing.scope, prefix_digest(()) if missing.is_prefix else NEUTRAL, missing.ids),
            self.planner.lookup.present, vllm_config.model_config.max_model_len - len(self._sink_ids),
            config.populate_step_tokens, config.populate_queue_tokens)
        self._budget = PassBudget(batch_tokens, config.pass_step_tokens)
        self._beginnings = Beginnings(max(1024, kv_cache_config.num_blocks))
        self._siblings = Siblings()
        self._counts = RequestCounts()
        self._plans: dict[str, Plan] = {}
        self._jobs: list[BlendJob] = []
        self._loading: set[str] = set()
        self._blocks_loading: dict[Any, str] = {}
        self._reports: dict[str, BlendReport] = {}
        self._uncounted: list[Any] = []

    def start(self, facts: ModelFacts) -> None:
        """Takes what the worker side says of the model, before any request comes."""
        self.planner.know(facts)
        if self._apart:
            self._fingerprint.start(facts.fingerprint)
            self.planner.gate = Gate(facts.costs, facts.num_layers)
        else:
            self.planner.gate = Gate(facts.costs, facts.num_layers, self._store.unloaded)
        self._fingerprint.subscribe(self._leave)
        if self.audits is not None:
            self.audits.monitor.default = self.planner.default

    def add(self, request: Request) -> None:
        """Plans a request, before the scheduler first looks it up."""
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
        plan.always = params.always
        plan.explain = params.explain and self.config.statistics == "chunks"
        plan.fingerprint = self._fingerprint.value
        if plan.missing and self._populates and self._sink_ids:
            self.populator.add(request, plan.missing)
        if not plan.refused:
            self._choose_blocks(request, plan)
        if plan.stats.chunks or plan.stats.continued:
            self._plans[request.request_id] = plan

    def tokens_to_load(self, request: Request, num_computed_tokens: int) -> int | None:
        """How many tokens behind the computed ones a pass fills; None where that is not known before the next step."""
        plan = self._plans.get(request.request_id)
        if plan is None:
            return 0
        if not request.num_preemptions:
            plan.stats.prefix_cached_tokens = num_computed_tokens
        if plan.fingerprint != self._fingerprint.value:
            plan.outdated = not request.num_preemptions  # the statistics are of the first time
            return 0
        useful = not plan.failed and any(p.end > num_computed_tokens for p in plan.placements)
        # A hit that reaches into blended blocks is this same prompt again.  What is left is a block at the most, unless
        # the prompt's last blocks had to make room: they are blended again.
        left = plan.stats.prompt_tokens - num_computed_tokens
        little = left <= max(self._block_size, plan.stats.prompt_tokens // _PASS_SHARE)
        blended_from = plan.salts[-1][0] if plan.salts else plan.exact_tokens
        if not useful or (num_computed_tokens > blended_from and little):
            return 0
        plan.last_block = request.block_hashes[-1] if request.block_hashes else None
        if self._blocks_loading.get(plan.last_block, request.request_id) != request.request_id:
            return None  # the same prompt is being blended: its blocks will be in the prefix cache
        plan.declined = not self.planner.worth(plan, min(plan.read, num_computed_tokens), num_computed_tokens)
        return 0 if plan.declined else max(0, left - 1)

    def allocate(self, request: Request, block_ids: tuple[list[int], ...], num_tokens: int) -> None:
        """Takes the blocks of a request of which a pass fills some tokens, or none."""
        if self.config.statistics == "none":
            self._uncounted.append(request.prefill_stats)
        if num_tokens == 0:
            self._end_loading(request.request_id)
            return
        plan = self._plans[request.request_id]
        plan.prefill = request.prefill_stats
        write_from = len(plan.ids) - 1 - num_tokens
        self._loading.add(request.request_id)
        if plan.last_block is not None:
            self._blocks_loading[plan.last_block] = request.request_id
        self._jobs.append(BlendJob(
            request_id=request.request_id, token_ids=plan.ids[:-1], placements=plan.placements,
            question_start=plan.question_start, policy=plan.policy, read=min(plan.read, write_from),
            write_from=write_from, block_ids=block_ids, resumed=request.num_preemptions > 0, explain=plan.explain,
            fingerprint=plan.fingerprint))

    def build(self, scheduler_output: SchedulerOutput) -> BlendMetadata:
        """The message to the workers for a step."""
        for prefill_stats in self._uncounted:  # vLLM has counted what its own prefix cache held
            count_cached(prefill_stats, 0)
        self._uncounted.clear()
        jobs, self._jobs = self._jobs, []
        load = StepLoad.of(scheduler_output, bool(self._loading))
        metadata = BlendMetadata(jobs, self._budget.rows(load) if self._loading else 0, *self.populator.take(load),
                                 self._sink_ids, generation=self._fingerprint.generation)
        self._generation_sent = self._fingerprint.generation
        if self.audits is not None:
            if not metadata.encode_rows:
                metadata.audits, metadata.audit_rows = self.audits.take(load)
            metadata.quality = self.audits.news("worker")
        metadata.idle = not (load.tokens or metadata.encode_rows or metadata.audit_rows)
        return metadata

    @property
    def pending(self) -> bool:
        """Whether steps are needed for what no request waits for."""
        unsent = self._apart and self._generation_sent != self._fingerprint.generation
        return unsent or self.populator.pending or (self.audits is not None and self.audits.pending)

    def update(self, reports: Any) -> None:
        """Takes the workers' message of a step, if there is one."""
        if not isinstance(reports, BlendReports):
            return
        if reports.model:
            self._fingerprint.change(model=reports.model)
        if reports.encoded is not None:
            self.populator.done(reports.encoded)
        if reports.audits and self.audits is not None:
            self.audits.done(reports.audits)
        for request_id, report in reports.reports.items():
            self._loading.discard(request_id)
            plan = self._plans.get(request_id)
            if plan is not None:  # it was not aborted meanwhile
                self._take_report(request_id, plan, report)

    def finish(self, request: Request) -> dict[str, Any] | None:
        """What the answer of a request says of blending."""
        self._end_loading(request.request_id)
        plan = self._plans.pop(request.request_id, None)
        report = self._reports.pop(request.request_id, None)
        if plan is None:
            return None
        stats = self.planner.conclude(plan, report)
        if request.num_output_tokens:
            self._counts.add(stats)
        return self._siblings.of(request.request_id) or self._statistics(stats)

    def news(self) -> dict[str, Any]:
        """What vLLM's metrics have to know since the last call: see `blendrag.runtime.metrics.ConnectorStats`."""
        news: dict[str, Any] = self._counts.news() or {}
        policies = self.audits.news("metrics") if self.audits is not None else None
        return news if policies is None else news | {"policies": policies}

    def shutdown(self) -> None:
        """Deletes what no other engine can reuse."""
        if self._fingerprint.own:
            self._leave("")

    def _leave(self, fingerprint: str) -> None:
        """Plans with the entries of another fingerprint from now on.

        What no other engine finds of those before is deleted, the rest leaves this engine's memory.
        """
        before, self.planner.lookup.facts.fingerprint = self.planner.lookup.facts.fingerprint, fingerprint
        self._beginnings.clear()
        try:
            if self.config.store_path is None or before != self._fingerprint.at_start:
                self._store.clear(fingerprint=before)
            else:
                self._store.free(before)
        except StoreError as error:
            logger.warning("what was stored under an earlier fingerprint could not be deleted: %s", error)

    def _choose_blocks(self, request: Request, plan: Plan) -> None:
        """Decides whose blocks a request finds in vLLM's prefix cache: exact ones, blended ones, or its own."""
        continues = self.config.conversations == "continue" and bool(self._beginnings)
        if not plan.placements and not continues:
            return
        exact = self._cached(request, request.block_hashes)  # what is exact is cached under the plain hashes only
        if plan.placements:
            self.planner.prefer_exact(plan, exact)
        if self.audits is not None and not self._heed_guard(request, plan):
            return
        kind = kind_of(plan.policy, self.config.sparse_attention)
        salts, cached = self._beginning(request, kind, exact) if continues else ((), exact)
        reads = self.planner.lookup.facts.reads_cache
        behind = bool(salts and reads and plan.placements) and self.planner.worth(plan, cached, cached)
        if behind and self.planner.gate.reads(plan, cached):
            plan.stats.continued = True
            plan.read, plan.salts = cached, salts_behind(salts, cached, plan.salt)
        elif salts and not (plan.placements and self.planner.worth(plan, 0, cached)):
            plan.stats.continued = True
            self.planner.leave_to_vllm(plan)
            plan.salts = salts
        elif plan.placements:
            plan.read = exact if reads else 0
            if plan.read > plan.exact_tokens:
                plan.salts = salts_behind((), exact, plan.salt)
            elif plan.salt:
                plan.salts = ((plan.exact_tokens, plan.salt),)
        if plan.salts:
            plan.hashes = salt_block_hashes(request, plan.salts, self._hash_block_size)
            plan.kind = kind

    def _heed_guard(self, request: Request, plan: Plan) -> bool:
        """Whether the quality guard allows blended blocks, perhaps of a stronger policy."""
        assert self.audits is not None
        ladder = self.audits.admit(request, plan) if plan.placements else self.audits.ladder(plan.policy)
        if ladder is None:
            return True
        self.planner.follow(plan, ladder)
        return ladder.level is Level.AS_ASKED or ladder.policy is not None

    def _beginning(self, request: Request, kind: bytes, exact: int) -> tuple[Salts, int]:
        """What the blended beginning is filed under of which the most is cached, and how many tokens that are.

        No salts where more is cached of an exact one.
        """
        best: Salts = ()
        most = exact
        for salts in self._beginnings.find(kind, request.block_hashes):
            cached = self._cached(request, salted(request.block_hashes, salts, self._hash_block_size))
            if cached > most:
                best, most = salts, cached
        return best, most

    def _cached(self, request: Request, hashes: list[Any]) -> int:
        return prefix_cached(hashes, request.num_tokens, self.cache_manager, self.block_pool, self._kv_cache_config,
                             self._hash_block_size)

    def _take_report(self, request_id: str, plan: Plan, report: BlendReport) -> None:
        plan.failed = bool(report.unwritten)
        if plan.salts and not plan.failed:
            first, full = plan.salts[0][0] // self._hash_block_size, (len(plan.ids) - 1) // self._hash_block_size
            self._beginnings.add(plan.kind, plan.hashes[first:full], plan.salts)
        if report.resumed and not report.failure:
            return  # the statistics are of the first time
        self._reports[request_id] = report
        count_cached(plan.prefill, report.cached + report.reused if self.config.statistics != "none" else 0)
        if sampled_from(request_id) is not None:
            self._siblings.add(request_id, self._statistics(self.planner.conclude(plan, report)))

    def _end_loading(self, request_id: str) -> None:
        """A request waits for no pass any more: its blocks are in the prefix cache, or it has ended."""
        self._loading.discard(request_id)
        plan = self._plans.get(request_id)
        if plan is not None and self._blocks_loading.get(plan.last_block) == request_id:
            del self._blocks_loading[plan.last_block]

    def _statistics(self, stats: BlendStats) -> dict[str, Any]:
        """What a request's answer says of it, as far as the settings allow."""
        if self.config.statistics == "none":
            return {}
        values = stats.to_dict()
        if self.config.statistics == "totals":
            del values["chunks"]
        return {BLEND_PARAMS_KEY: values}
