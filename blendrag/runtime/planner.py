"""The scheduler half: decides at a request's arrival which stored chunks it will use."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from blendrag.config import BlendConfig
from blendrag.errors import ConfigError, StoreError
from blendrag.policies import Policy
from blendrag.runtime.messages import BlendReport, ModelFacts, Placement
from blendrag.stats import BlendStats, ChunkStats
from blendrag.store import ChunkStore, entry_key, prefix_digest
from blendrag.store.keys import NEUTRAL

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_MIN_QUESTION = 8
_LAST_TOKENS = 32


@dataclass
class Plan:
    """What a request will reuse, and what is known of it so far.

    `keys` names the stored entry of each chunk in `stats.chunks`; empty where there is none.
    """

    policy: Policy
    placements: list[Placement]
    question_start: int
    exact_tokens: int
    salt: bytes
    stats: BlendStats
    keys: list[str] = field(default_factory=list)


class Planner:
    """Finds stored chunks in marked prompts and turns worker reports into statistics."""

    def __init__(self, config: BlendConfig, store: ChunkStore) -> None:
        self.config = config
        self.store = store
        self.facts: ModelFacts | None = None

    def plan(self, request: Request, marks: dict[str, Any]) -> Plan:
        """The plan of a request whose prompt marks its chunks.

        Args:
            marks: {"spans": [[start, end], ...], "policy": settings}, see `blendrag.engine`.
        """
        ids = request.prompt_token_ids or []
        try:
            policy = self.config.make_policy(**marks.get("policy", {}))
            spans = _clean_spans(marks.get("spans", []), len(ids))
        except (AttributeError, TypeError, ValueError, OverflowError, ConfigError) as error:
            # Marks come from clients, and this runs on the scheduler's thread.
            logger.warning("request %s has marks that make no sense, prefilling in full: %s", request.request_id, error)
            policy, spans = self.config.make_policy(), []
        chunks = [ChunkStats(start, end - start) for start, end in spans]
        stats = BlendStats(policy=policy.name, prompt_tokens=len(ids), chunks=chunks)
        plan = Plan(policy, [], _question_start(spans, len(ids)), 0, b"", stats)
        if reason := _refusal(request):
            for chunk in chunks:
                chunk.reason = reason
            return plan
        self._place(plan, ids, spans)
        if not any(chunk.reused for chunk in chunks):
            plan.placements.clear()
        else:
            plan.exact_tokens = _exact_tokens(plan.placements)
            plan.salt = self._salt(plan, ids)
        return plan

    def _place(self, plan: Plan, ids: list[int], spans: list[tuple[int, int]]) -> None:
        """Looks the shared prefix and each chunk up.

        A chunk encoded behind this prompt's own prefix is preferred; the neutral variant serves any prompt.
        """
        limit = len(ids) - 1  # the last token is vLLM's
        first = spans[0][0] if spans else 0
        digest = prefix_digest(ids[:first])
        prefix_key = self._key(prefix_digest(()), ids[:first])
        variants = [[self._key(d, ids[start:end]) for d in (digest, NEUTRAL)] for start, end in spans]
        present = self._present([prefix_key, *(key for keys in variants for key in keys)])
        if first and prefix_key in present:
            plan.placements.append(Placement(0, min(first, limit), prefix_key, exact=True))
        for (start, end), keys, chunk in zip(spans, variants, plan.stats.chunks, strict=True):
            found = next((key for key in keys if key in present), "")
            plan.keys.append(found)
            if end - start < self.config.min_chunk_tokens:
                chunk.reason = "too short"
            elif not found:
                chunk.reason = "not stored"
            elif start == limit:
                chunk.reason = "too short"
            else:
                chunk.reused, chunk.exact = True, start == first and found == keys[0]
                plan.placements.append(Placement(start, min(end, limit), found, chunk.exact))

    def _present(self, keys: list[str]) -> set[str]:
        try:
            return self.store.present(keys)
        except StoreError as error:
            logger.warning("the store cannot be asked, prefilling in full: %s", error)
            return set()

    def _key(self, digest: bytes, ids: Sequence[int]) -> str:
        assert self.facts is not None
        return entry_key(self.facts.fingerprint, self.config.namespace, digest, ids)

    @staticmethod
    def _salt(plan: Plan, ids: list[int]) -> bytes:
        """Names all that the approximate KV of this prompt depends on besides the tokens before it."""
        parts: list[Any] = [plan.policy.settings(), [(p.start, p.end, p.key) for p in plan.placements]]
        if plan.policy.evidence(num_layers=2) is not None:
            parts += [ids, plan.question_start]  # rows chosen by evidence depend on the whole prompt
        return blake3(repr(parts).encode()).digest(16)

    def conclude(self, plan: Plan, report: BlendReport | None) -> BlendStats:
        """The request's statistics; `report` is None where no blend pass ran for it."""
        stats = deepcopy(plan.stats)
        if report is None:
            _mark_lost(stats, plan.keys, set(plan.keys), "prefix cached")
            stats.rows = 1 - stats.prefix_cached_tokens / max(1, stats.prompt_tokens)
            return stats
        assert self.facts is not None
        stats.load_s, stats.score_s, stats.blend_s = report.load_s, report.score_s, report.blend_s
        if report.failure:
            stats.failure = report.failure
            _mark_lost(stats, plan.keys, set(plan.keys), "pass failed")
            return stats
        _mark_lost(stats, plan.keys, set(report.damaged), "damaged")
        layers = self.facts.num_layers
        stats.reused_tokens, stats.recomputed_tokens = report.reused, report.recomputed
        stats.rows = (report.row_layers + layers) / (layers * stats.prompt_tokens)
        return stats


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


def _clean_spans(spans: Sequence[Sequence[int]], length: int) -> list[tuple[int, int]]:
    """The spans in order, without empty, overlapping or overlong ones: marks come from clients."""
    clean: list[tuple[int, int]] = []
    for start, end in sorted((int(a), int(b)) for a, b in spans):
        if max(0, clean[-1][1] if clean else 0) <= start < end <= length:
            clean.append((start, end))
    return clean


def _question_start(spans: list[tuple[int, int]], length: int) -> int:
    """The text behind the last chunk is the question; where there is next to none, the prompt's last tokens are."""
    start = spans[-1][1] if spans else 0
    return start if length - start >= _MIN_QUESTION else max(0, length - _LAST_TOKENS)


def _exact_tokens(placements: list[Placement]) -> int:
    """How many leading tokens will be as a full prefill would have them: all before the first approximate entry."""
    return min((p.start for p in placements if not p.exact), default=placements[-1].end)
