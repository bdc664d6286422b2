"""The scheduler side: decides at a request's arrival which stored chunks it will use."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import numpy as np

from blendrag.config import BlendConfig
from blendrag.errors import ConfigError, PromptError
from blendrag.guard.ladder import Ladder, Level
from blendrag.policies import Policy, require_affordable
from blendrag.profile import default_policy
from blendrag.runtime.messages import BlendReport, ModelFacts
from blendrag.runtime.planning.gate import Gate
from blendrag.runtime.planning.locating import Marked, Span, as_ids, locate
from blendrag.runtime.planning.lookup import Lookup
from blendrag.runtime.planning.placing import Placing, Plan
from blendrag.runtime.planning.salt import salt_of
from blendrag.runtime.planning.scope import scopes_of
from blendrag.stats import NOT_WORTH, OUTDATED, PREFIX_CACHED, BlendStats, ChunkStats
from blendrag.store import ChunkStore

if TYPE_CHECKING:
    import numpy.typing as npt
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_MIN_QUESTION = 8
_LAST_TOKENS = 32


class Planner:
    """Finds stored chunks in prompts and turns worker reports into statistics."""

    def __init__(self, config: BlendConfig, store: ChunkStore) -> None:
        self.config = config
        self.lookup = Lookup(config, store)
        self._default: Policy = config.make_policy()
        self._calibrated = False
        self.gate = Gate()

    def know(self, facts: ModelFacts) -> None:
        """Takes what the worker side says of the model, before any request comes."""
        self.lookup.facts = facts
        self._default, self._calibrated = default_policy(self.config, facts.fingerprint)
        require_affordable(self._default, facts.num_layers)

    @property
    def default(self) -> Policy:
        """Of requests that name no policy."""
        return self._default

    def plan(self, request: Request, spans: Sequence[Sequence[int]] = (),
             policy: Policy | Mapping[str, Any] | None = None,
             documents: Iterable[npt.NDArray[np.int64]] = ()) -> Plan | None:
        """The plan of a request; None for one that must not be blended.

        Args:
            spans: `[start, end)` of each chunk that the prompt marks.  Stored chunks elsewhere in the prompt
                are found by their tokens.
            policy: for this request, instead of the engine's default; or settings of it.
            documents: token ids of chunks that stand somewhere in the prompt.
        """
        scopes = scopes_of(self.config, request.cache_salt)
        if not scopes:
            return None
        try:
            ids = as_ids(request.prompt_token_ids or [])
            chosen = self._chosen(policy)
            if len(spans) > self.config.max_documents:
                raise PromptError(f"{len(spans)} spans, where max_documents is {self.config.max_documents}")
            clean = _clean_spans(spans, len(ids))
            located, lost = locate(ids, documents, clean)
        except (AttributeError, TypeError, ValueError, OverflowError, ConfigError, PromptError) as error:
            # Marks come from clients, and this runs on the scheduler's thread.
            logger.warning("request %s has marks that make no sense, prefilling in full: %s", request.request_id, error)
            return None
        marked = sorted([*(Marked(start, end, ids[start:end]) for start, end in clean), *located],
                        key=lambda mark: mark.start)
        absent = [ChunkStats(-1, tokens, reason="not in the prompt") for tokens in lost]
        plan = Plan(chosen, BlendStats(
            policy=chosen.name, prompt_tokens=len(ids), calibrated=self._calibrated and chosen is self._default,
            ignored="policy: client_policy is off" if policy and not self.config.client_policy else ""), ids)
        if reason := _refusal(request):
            refused = [ChunkStats(mark.start, mark.end - mark.start, reason=reason) for mark in marked]
            plan.stats.chunks = refused + absent
            plan.refused = True
            return plan if plan.stats.chunks else None
        Placing(self.lookup, scopes, ids, marked).place(plan)
        if not plan.stats.chunks:
            plan.stats.chunks = absent
            return plan
        plan.question_start = _question_start(plan.stats.chunks[-1], len(ids))
        if chosen.exact_only:
            _keep_exact(plan)
        if any(chunk.reused for chunk in plan.stats.chunks):
            plan.exact_tokens = min((p.start for p in plan.placements if not p.exact), default=len(ids))
            plan.salt = salt_of(plan, self.config.sparse_attention)
        else:
            plan.placements.clear()
        plan.stats.chunks += absent
        return plan

    def prefer_exact(self, plan: Plan, cached: int) -> None:
        """Leaves a request to vLLM where that takes no longer than a blend pass, and is exact.

        Its hashes stay plain then, so it is never blended, even if the blocks are evicted before it is scheduled.

        Args:
            cached: its leading tokens that vLLM's prefix cache holds as a full prefill computed them.
        """
        if not self.worth(plan, cached if self.lookup.facts.reads_cache else 0, cached):
            self.leave_to_vllm(plan)

    def leave_to_vllm(self, plan: Plan) -> None:
        """Lets vLLM compute what its prefix cache does not hold."""
        plan.declined = True
        plan.placements.clear()

    def follow(self, plan: Plan, ladder: Ladder) -> None:
        """Gives a request what the quality guard leaves of its policy."""
        if ladder.level is Level.AS_ASKED:
            return
        plan.stats.guard = ladder.level.value
        if ladder.policy is not None:
            plan.policy = ladder.policy
            plan.salt = salt_of(plan, self.config.sparse_attention)
            return
        plan.placements.clear()
        _mark_lost(plan.stats, plan.keys, set(plan.keys), ladder.level.value)

    def worth(self, plan: Plan, read: int, computed: int) -> bool:
        """Whether a blend pass beats vLLM, which holds the first `computed` tokens already; see `Gate`.

        Args:
            read: leading tokens that the pass reads from vLLM's paged cache.
        """
        decision = self.gate.decide(plan, computed, read)
        plan.stats.estimated_prefill_s, plan.stats.estimated_blend_s = decision.prefill_s, decision.blend_s
        return decision.blend

    def _chosen(self, policy: Policy | Mapping[str, Any] | None) -> Policy:
        """The policy of a request that brings one, or settings; ConfigError for nonsense, or what costs too much."""
        if isinstance(policy, Policy):
            return policy  # made by an engine in this process, which has checked it
        if not policy or not self.config.client_policy:
            return self._default
        chosen = self.config.make_policy(**policy)
        require_affordable(chosen, self.lookup.facts.num_layers)
        return chosen

    def conclude(self, plan: Plan, report: BlendReport | None) -> BlendStats:
        """The request's statistics; `report` is None where no blend pass ran for it."""
        stats = deepcopy(plan.stats)
        if plan.outdated or (report is not None and report.outdated):
            _mark_lost(stats, plan.keys, set(plan.keys), OUTDATED)
        if report is None:
            _mark_lost(stats, plan.keys, set(plan.keys), NOT_WORTH if plan.declined else PREFIX_CACHED)
            for chunk in stats.chunks:
                partly = chunk.start < stats.prefix_cached_tokens
                whole = chunk.start + chunk.tokens <= stats.prefix_cached_tokens
                if chunk.reason == NOT_WORTH and (whole or (partly and stats.continued)):
                    chunk.reason = PREFIX_CACHED
            stats.rows = 1 - stats.prefix_cached_tokens / max(1, stats.prompt_tokens)
            return stats
        stats.load_s, stats.score_s, stats.blend_s = report.load_s, report.score_s, report.blend_s
        if report.failure:
            stats.failure = report.failure
            _mark_lost(stats, plan.keys, set(plan.keys), "pass failed")
            return stats
        _mark_lost(stats, plan.keys, set(report.damaged), "damaged")
        for chunk in stats.chunks:
            if chunk.reused and chunk.start + chunk.tokens <= report.cached:
                chunk.reused, chunk.exact, chunk.reason = False, False, PREFIX_CACHED
        layers = self.lookup.facts.num_layers
        stats.reused_tokens, stats.recomputed_tokens = report.reused, report.recomputed
        stats.rows = (report.row_layers + layers) / (layers * stats.prompt_tokens)
        stats.map = report.map
        return stats


def _keep_exact(plan: Plan) -> None:
    """Leaves the placements that change nothing, and says so of the others' chunks."""
    plan.placements = [placement for placement in plan.placements if placement.exact]
    for number, chunk in enumerate(plan.stats.chunks):
        if chunk.reused and not chunk.exact:
            chunk.reused, chunk.reason, plan.keys[number] = False, "approximate", ""


def _refusal(request: Request) -> str:
    """Why a request is prefilled in full whatever is stored; empty where it is not."""
    if request.lora_request is not None:
        return "LoRA request"
    if request.prompt_embeds is not None:
        return "prompt embeddings"
    if request.mm_features:
        return "multimodal request"
    if request.skip_reading_prefix_cache:
        return "prompt logprobs asked for"
    return ""


def _mark_lost(stats: BlendStats, keys: list[str], lost: set[str], reason: str) -> None:
    for key, chunk in zip(keys, stats.chunks, strict=False):
        if chunk.reused and key in lost:
            chunk.reused, chunk.exact, chunk.reason = False, False, reason


def _clean_spans(spans: Sequence[Sequence[int]], length: int) -> list[Span]:
    """The spans in order, without empty, overlapping or overlong ones: marks come from clients."""
    clean: list[Span] = []
    for start, end in sorted((int(a), int(b)) for a, b in spans):
        if max(0, clean[-1][1] if clean else 0) <= start < end <= length:
            clean.append((start, end))
    return clean


def _question_start(last: ChunkStats, length: int) -> int:
    """The text behind the last chunk is the question; where there is next to none, the prompt's last tokens are."""
    start = last.start + last.tokens
    return start if length - start >= _MIN_QUESTION else max(0, length - _LAST_TOKENS)
