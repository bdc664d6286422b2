"""The scheduler half: decides at a request's arrival which stored chunks it will use."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from blake3 import blake3

from blendrag.config import BlendConfig
from blendrag.errors import ConfigError, StoreError
from blendrag.policies import Full, Policy
from blendrag.runtime.messages import BlendReport, Missing, ModelFacts, Placement
from blendrag.stats import PREFIX_CACHED, BlendStats, ChunkStats
from blendrag.store import ChunkStore, entry_key, prefix_digest
from blendrag.store.index import Match
from blendrag.store.keys import NEUTRAL, PrefixHasher, rank_keys

if TYPE_CHECKING:
    import numpy.typing as npt
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_MIN_QUESTION = 8
_LAST_TOKENS = 32
_REMEMBERED = 4096
_USUAL_RATIO = 0.15

Span = tuple[int, int]


@dataclass
class Plan:
    """What a request will reuse, and what is known of it so far.

    Attributes:
        ids: the prompt.
        keys: the stored entry of each chunk in `stats.chunks`; empty where there is none.
        missing: what would be of use another time and is not stored: the marked chunks, and a prefix that was seen
            before.
        declined: vLLM's prefix cache left less to compute than a blend pass would have.
    """

    policy: Policy
    stats: BlendStats
    ids: npt.NDArray[np.int64]
    placements: list[Placement] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    question_start: int = 0
    exact_tokens: int = 0
    salt: bytes = b""
    declined: bool = False


class Planner:
    """Finds stored chunks in prompts and turns worker reports into statistics."""

    def __init__(self, config: BlendConfig, store: ChunkStore) -> None:
        self.config = config
        self.store = store
        self.facts: ModelFacts | None = None
        self._prefixes: OrderedDict[str, None] = OrderedDict()

    def plan(self, request: Request, spans: Sequence[Sequence[int]] = (),
             policy: Mapping[str, Any] | None = None) -> Plan | None:
        """The plan of a request; None for one that has nothing to do with chunks.

        Args:
            spans: `[start, end)` of each chunk that the prompt marks.  Stored chunks elsewhere in the prompt
                are found by their tokens.
            policy: settings for this request.
        """
        ids = np.asarray(request.prompt_token_ids or [], np.int64)
        try:
            chosen = self.config.make_policy(**(policy or {}))
            marked = _clean_spans(spans, len(ids))
        except (AttributeError, TypeError, ValueError, OverflowError, ConfigError) as error:
            # Marks come from clients, and this runs on the scheduler's thread.
            logger.warning("request %s has marks that make no sense, prefilling in full: %s", request.request_id, error)
            return None
        plan = Plan(chosen, BlendStats(policy=chosen.name, prompt_tokens=len(ids)), ids)
        if reason := _refusal(request):
            plan.stats.chunks = [ChunkStats(start, end - start, reason=reason) for start, end in marked]
            return plan if marked else None
        finder = _Finder(self, ids, marked)
        finder.place(plan)
        if not plan.stats.chunks:
            return None
        plan.question_start = _question_start(plan.stats.chunks[-1], len(ids))
        if any(chunk.reused for chunk in plan.stats.chunks):
            plan.exact_tokens = _exact_tokens(plan.placements)
            plan.salt = self._salt(plan, ids)
        else:
            plan.placements.clear()
        return plan

    def present(self, keys: Collection[str]) -> set[str]:
        """Those of `keys` that every rank has stored."""
        assert self.facts is not None
        ranks = {key: rank_keys(key, self.facts.ranks) for key in keys}
        try:
            found = self.store.present([known for many in ranks.values() for known in many])
        except StoreError as error:
            logger.warning("the store cannot be asked, prefilling in full: %s", error)
            return set()
        return {key for key, many in ranks.items() if found.issuperset(many)}

    def matches(self, ids: npt.NDArray[np.int64]) -> list[Match]:
        """Stored chunks in token ids, wherever they are."""
        assert self.facts is not None
        if not self.config.match:
            return []
        try:
            return self.store.find(ids, fingerprint=self.facts.fingerprint, namespace=self.config.namespace)
        except StoreError as error:
            logger.warning("the store cannot be searched, prefilling in full: %s", error)
            return []

    def seen(self, prefix_key: str) -> bool:
        """Whether an earlier prompt had this prefix: one that comes only once need not be stored."""
        before = prefix_key in self._prefixes
        self._prefixes[prefix_key] = None
        self._prefixes.move_to_end(prefix_key)
        if len(self._prefixes) > _REMEMBERED:
            self._prefixes.popitem(last=False)
        return before

    def worth(self, plan: Plan, computed: int) -> bool:
        """Whether a blend pass has less to compute than vLLM has, which holds the first `computed` tokens already.

        A pass cannot read the paged cache: a prefix that is cached there and not stored here would be computed again.
        """
        if isinstance(plan.policy, Full):
            return True
        length = plan.stats.prompt_tokens
        stored = sum(p.end - p.start for p in plan.placements)
        approximate = sum(p.end - p.start for p in plan.placements if not p.exact)
        return length - stored + _USUAL_RATIO * approximate < length - computed

    def key(self, digest: bytes, ids: npt.NDArray[np.int64] | Sequence[int]) -> str:
        """The name of a chunk's entry behind a prefix."""
        assert self.facts is not None
        return entry_key(self.facts.fingerprint, self.config.namespace, digest, ids)

    def _salt(self, plan: Plan, ids: npt.NDArray[np.int64]) -> bytes:
        """Names all that the approximate KV of this prompt depends on besides the tokens before it."""
        placed = [(p.start, p.end, p.offset, p.key) for p in plan.placements]
        salt = blake3(repr([plan.policy.settings(), self.config.sparse_attention, placed]).encode())
        if plan.policy.evidence(num_layers=2):
            salt.update(ids.tobytes()).update(str(plan.question_start).encode())
        return salt.digest(16)

    def conclude(self, plan: Plan, report: BlendReport | None) -> BlendStats:
        """The request's statistics; `report` is None where no blend pass ran for it."""
        stats = deepcopy(plan.stats)
        if report is None:
            _mark_lost(stats, plan.keys, set(plan.keys), "not worth a pass" if plan.declined else PREFIX_CACHED)
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


class _Finder:
    """Places the stored chunks of one prompt.

    A chunk encoded behind the very tokens that precede it here is exact.  Next comes the variant encoded behind
    this prompt's own prefix, the tokens before its first chunk; the neutral variant serves any prompt.
    """

    def __init__(self, planner: Planner, ids: npt.NDArray[np.int64], marked: list[Span]) -> None:
        self.planner = planner
        self.ids = ids
        self.limit = len(ids) - 1  # the last token is vLLM's
        self.marked = marked
        self.matches = [match for match in planner.matches(ids[: self.limit])
                        if match.end - match.start >= planner.config.min_chunk_tokens]
        self._hasher = PrefixHasher(ids)
        self._digests: dict[int, bytes] = {}

    def place(self, plan: Plan) -> None:
        first = self._first()
        wanted = {span: self._variants(span, first) for span in self.marked}
        prefix_key = self.planner.key(prefix_digest(()), self.ids[:first])
        for match in self.matches:
            known = [match.variants[d] for d in self._fitting(match.start, first, match.offset) if d in match.variants]
            wanted.setdefault((match.start, match.end), known)
        present = self.planner.present([prefix_key, *(key for keys in wanted.values() for key in keys)])
        if first and prefix_key in present:
            plan.placements.append(Placement(0, min(first, self.limit), prefix_key, exact=True))
        elif first >= self.planner.config.min_chunk_tokens and self.planner.seen(prefix_key):
            plan.missing.append(Missing(self.ids[:first].tolist(), is_prefix=True))
        taken = np.zeros(len(self.ids), bool)
        taken[:first] = True
        found: list[tuple[ChunkStats, str]] = []
        for span in self.marked:
            key = next((key for key in wanted[span] if key in present), "")
            chunk = self._marked_chunk(plan, span, key)
            if chunk.reused:
                chunk.exact = key == wanted[span][0]
                taken[span[0] : span[1]] = True
                plan.placements.append(Placement(span[0], min(span[1], self.limit), key, chunk.exact))
            found.append((chunk, key))
        for match in self.matches:
            key = next((key for key in wanted[match.start, match.end] if key in present), "")
            if key and not taken[match.start : match.end].any():
                exact = match.offset == 0 and key == match.variants.get(self._digest(match.start))
                found.append((ChunkStats(match.start, match.end - match.start, reused=True, exact=exact), key))
                plan.placements.append(Placement(match.start, match.end, key, exact, match.offset))
        found.sort(key=lambda item: (item[0].start, -item[0].tokens))
        plan.stats.chunks = [chunk for chunk, _ in found]
        plan.keys = [key for _, key in found]
        plan.placements.sort(key=lambda placement: placement.start)

    def _first(self) -> int:
        """Where the first chunk begins: what stands before it is this prompt's prefix."""
        starts = [span[0] for span in self.marked[:1]]
        for match in self.matches:
            if NEUTRAL in match.variants or self._digest(match.start) in match.variants:
                starts.append(match.start)
                break
        return min(starts, default=0)

    def _variants(self, span: Span, first: int) -> list[str]:
        """The keys that would serve a marked chunk, the best first; the first one is exact."""
        ids = self.ids[span[0] : span[1]]
        return [self.planner.key(digest, ids) for digest in self._fitting(span[0], first)]

    def _fitting(self, start: int, first: int, offset: int = 0) -> list[bytes]:
        """Digests of the prefixes that a chunk at `start` may have been encoded behind, the best first."""
        behind = {first, self.marked[0][0]} if self.marked else {first}
        places = ([start] if offset == 0 else []) + sorted(behind - {start})
        return [*map(self._digest, places), NEUTRAL]

    def _marked_chunk(self, plan: Plan, span: Span, key: str) -> ChunkStats:
        chunk = ChunkStats(span[0], span[1] - span[0])
        if chunk.tokens < self.planner.config.min_chunk_tokens or span[0] == self.limit:
            chunk.reason = "too short"
        elif not key:
            chunk.reason = "not stored"
            plan.missing.append(Missing(self.ids[span[0] : span[1]].tolist(), is_prefix=False))
        else:
            chunk.reused = True
        return chunk

    def _digest(self, end: int) -> bytes:
        if end not in self._digests:
            self._digests[end] = self._hasher.digest(end)
        return self._digests[end]


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


def _exact_tokens(placements: list[Placement]) -> int:
    """How many leading tokens will be as a full prefill would have them: all before the first approximate entry."""
    return min((p.start for p in placements if not p.exact), default=placements[-1].end)
