"""Which stored entry stands where in one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from blendrag.policies import Policy
from blendrag.runtime.messages import Missing, Placement
from blendrag.runtime.planning.locating import Marked
from blendrag.runtime.planning.lookup import Lookup
from blendrag.stats import BlendStats, ChunkStats
from blendrag.store import prefix_digest
from blendrag.store.keys import NEUTRAL, PrefixHasher

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass
class Plan:
    """What a request will reuse, and what is known of it so far.

    Attributes:
        ids: the prompt.
        keys: the stored entry of each chunk in `stats.chunks`; empty where there is none.
        missing: what would be of use another time and is not stored: the marked chunks, and a prefix that was seen
            before.
        exact_tokens: so many leading tokens will be as a full prefill has them.
        salt: what the KV of the others depends on, see `salt_of`; empty where there are none.
        explain: tell token by token what a pass did.
        declined: vLLM's prefix cache left less to compute than a blend pass would have.
        prefill: vLLM's own count of the prompt tokens it need not compute, once a pass is under way.
        fingerprint: what the entries are named after.
        outdated: the engine has another fingerprint now.
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
    explain: bool = False
    declined: bool = False
    prefill: Any = None
    fingerprint: str = ""
    outdated: bool = False


class Placing:
    """Places the stored chunks of one prompt's scopes: those of its `cache_salt`, and its namespace's.

    A chunk encoded behind the very tokens that precede it here is exact.  Next comes the variant encoded behind
    this prompt's own prefix, the tokens before its first chunk; the neutral variant serves any prompt.
    """

    def __init__(self, lookup: Lookup, scopes: Sequence[str], ids: npt.NDArray[np.int64],
                 marked: list[Marked]) -> None:
        self.lookup = lookup
        self.scopes = scopes
        self.scope = scopes[0]
        self.ids = ids
        self.limit = len(ids) - 1  # the last token is vLLM's
        self.marked = marked
        self.matches = sorted((match for scope in scopes for match in lookup.matches(scope, ids[: self.limit])
                               if match.end - match.start >= lookup.config.min_chunk_tokens),
                              key=lambda match: match.start)
        self._hasher = PrefixHasher(ids)
        self._digests: dict[int, bytes] = {}

    def place(self, plan: Plan) -> None:
        first = self._first()
        wanted = [self._variants(mark, first) if self._usable(mark) else [] for mark in self.marked]
        matched = [[match.variants[digest] for digest in self._fitting(match.start, first, match.offset)
                    if digest in match.variants] for match in self.matches]
        prefix_keys = [self.lookup.key(scope, prefix_digest(()), self.ids[:first]) for scope in self.scopes]
        present = self.lookup.present([*prefix_keys, *(key for keys in [*wanted, *matched] for key in keys)])
        prefix_key = next((key for key in prefix_keys if key in present), "")
        if first and prefix_key:
            plan.placements.append(Placement(0, min(first, self.limit), prefix_key, exact=True))
        elif first >= self.lookup.config.min_chunk_tokens and self.lookup.seen(prefix_keys[0]):
            plan.missing.append(Missing(self.ids[:first].tolist(), True, self.scope))
        taken = np.zeros(len(self.ids), bool)
        taken[:first] = True
        found: list[tuple[ChunkStats, str]] = []
        for mark, keys in zip(self.marked, wanted, strict=True):
            key = next((key for key in keys if key in present), "")
            chunk = self._marked_chunk(plan, mark, key)
            if chunk.reused:
                chunk.exact = mark.offset == 0 and key in keys[: len(self.scopes)]
                taken[mark.start : mark.end] = True
                plan.placements.append(Placement(mark.start, min(mark.end, self.limit), key, chunk.exact, mark.offset))
            found.append((chunk, key))
        for match, keys in zip(self.matches, matched, strict=True):
            key = next((key for key in keys if key in present), "")
            if key and not taken[match.start : match.end].any():
                taken[match.start : match.end] = True
                exact = match.offset == 0 and key == match.variants.get(self._digest(match.start))
                found.append((ChunkStats(match.start, match.end - match.start, reused=True, exact=exact), key))
                plan.placements.append(Placement(match.start, match.end, key, exact, match.offset))
        found.sort(key=lambda item: (item[0].start, -item[0].tokens))
        plan.stats.chunks = [chunk for chunk, _ in found]
        plan.keys = [key for _, key in found]
        plan.placements.sort(key=lambda placement: placement.start)

    def _first(self) -> int:
        """Where the first chunk begins: what stands before it is this prompt's prefix."""
        starts = [mark.start for mark in self.marked[:1]]
        for match in self.matches:
            if NEUTRAL in match.variants or self._digest(match.start) in match.variants:
                starts.append(match.start)
                break
        return min(starts, default=0)

    def _variants(self, mark: Marked, first: int) -> list[str]:
        """The keys that would serve a marked chunk, the best first; that of a whole one is exact."""
        return [self.lookup.key(scope, digest, mark.ids)
                for digest in self._fitting(mark.start, first, mark.offset) for scope in self.scopes]

    def _fitting(self, start: int, first: int, offset: int = 0) -> list[bytes]:
        """Digests of the prefixes that a chunk at `start` may have been encoded behind, the best first."""
        behind = {first, self.marked[0].start} if self.marked else {first}
        places = ([start] if offset == 0 else []) + sorted(behind - {start})
        return [*map(self._digest, places), NEUTRAL]

    def _marked_chunk(self, plan: Plan, mark: Marked, key: str) -> ChunkStats:
        chunk = ChunkStats(mark.start, mark.end - mark.start)
        if not self._usable(mark):
            chunk.reason = "too short"
        elif not key:
            chunk.reason = "not stored"
            plan.missing.append(Missing(mark.ids.tolist(), False, self.scope))
        else:
            chunk.reused = True
        return chunk

    def _usable(self, mark: Marked) -> bool:
        return mark.end - mark.start >= self.lookup.config.min_chunk_tokens and mark.start != self.limit

    def _digest(self, end: int) -> bytes:
        if end not in self._digests:
            self._digests[end] = self._hasher.digest(end)
        return self._digests[end]
