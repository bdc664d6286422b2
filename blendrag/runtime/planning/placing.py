"""Which stored entry stands where in one prompt."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
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
        always: blend whatever is stored, also where a full prefill is estimated to be as quick.
        declined: a full prefill was estimated to be as quick as a blend pass.
        prefill: vLLM's own count of the prompt tokens it need not compute, once a pass is under way.
        fingerprint: what the entries are named after.
        outdated: the engine has another fingerprint now.
        refused: this kind of request is never blended.
        read: leading tokens that a pass reads from vLLM's paged cache, where that holds them.
        salts: what the request's blocks are filed under; empty where all are exact.
        hashes: of its blocks, unsalted, where there are salts; they grow along with it.
        kind: `kind_of` what a pass does.
        last_block: the hash of its last full block when it was last looked up; None where it has none.
        failed: a pass could not write its blocks.
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
    always: bool = False
    declined: bool = False
    prefill: Any = None
    fingerprint: str = ""
    outdated: bool = False
    refused: bool = False
    read: int = 0
    salts: tuple[tuple[int, bytes], ...] = ()
    hashes: list[Any] = field(default_factory=list)
    kind: bytes = b""
    last_block: Any = None
    failed: bool = False


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
        by_scope = [[match for match in lookup.matches(scope, ids[: self.limit])
                     if match.end - match.start >= lookup.config.min_chunk_tokens] for scope in scopes]
        self.matches = sorted(chain(*by_scope), key=lambda match: match.start)
        self._whole = [{(match.start, match.end): match.variants for match in matches
                        if match.end - match.start == match.tokens} for matches in by_scope]
        self._hasher = PrefixHasher(ids)
        self._digests: dict[int, bytes] = {}
        self._behind: list[int] = []
        self._usual: set[bytes] = set()

    def place(self, plan: Plan) -> None:
        first = self._first()
        self._behind = sorted({first, *(mark.start for mark in self.marked[:1])})
        self._usual = {NEUTRAL, *map(self._digest, self._behind)}
        wanted = [self._variants(mark) if self._usable(mark) else {} for mark in self.marked]
        matched = [{match.variants[digest]: exact
                    for digest, exact in self._fitting(match.start, match.offset, match.variants).items()
                    if digest in match.variants} for match in self.matches]
        prefix_keys = [self.lookup.key(scope, prefix_digest(()), self.ids[:first]) for scope in self.scopes]
        present = self.lookup.present([*prefix_keys, *chain(*wanted, *matched)])
        prefix_key = next((key for key in prefix_keys if key in present), "")
        if first and prefix_key:
            plan.placements.append(Placement(0, min(first, self.limit), prefix_key, exact=True))
        elif first >= self.lookup.config.min_chunk_tokens and self.lookup.seen(prefix_keys[0]):
            plan.missing.append(Missing(self.ids[:first].tolist(), True, self.scope))
        taken = bytearray(len(self.ids))
        taken[:first] = b"\1" * first
        found: list[tuple[ChunkStats, str]] = []
        for mark, keys in zip(self.marked, wanted, strict=True):
            key = next((key for key in keys if key in present), "")
            chunk = self._marked_chunk(plan, mark, key)
            if chunk.reused:
                chunk.exact = keys[key]
                taken[mark.start : mark.end] = b"\1" * (mark.end - mark.start)
                plan.placements.append(Placement(mark.start, min(mark.end, self.limit), key, chunk.exact, mark.offset))
            found.append((chunk, key))
        for match, keys in zip(self.matches, matched, strict=True):
            key = next((key for key in keys if key in present), "")
            if key and taken.find(1, match.start, match.end) < 0:
                taken[match.start : match.end] = b"\1" * (match.end - match.start)
                found.append((ChunkStats(match.start, match.end - match.start, reused=True, exact=keys[key]), key))
                plan.placements.append(Placement(match.start, match.end, key, keys[key], match.offset))
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

    def _variants(self, mark: Marked) -> dict[str, bool]:
        """The keys that would serve a marked chunk, the best first, and whether each is exact.

        The content index has found most of them with the chunk, so that they need not be made by hashing it.  It does
        not know what is stored as the beginning of prompts.
        """
        whole = mark.end - mark.start == len(mark.ids) and mark.start > 0
        known = [variants.get((mark.start, mark.end)) if whole else None for variants in self._whole]
        complete = [variants for variants in known if variants is not None]
        fitting = self._fitting(mark.start, mark.offset,
                                set().union(*complete) if len(complete) == len(known) else None)
        by_scope = [self.lookup.keys(scope, fitting, mark.ids) if variants is None else
                    [variants.get(digest, "") for digest in fitting]
                    for scope, variants in zip(self.scopes, known, strict=True)]
        return {key: exact for *keys, exact in zip(*by_scope, fitting.values(), strict=True) for key in keys if key}

    def _fitting(self, start: int, offset: int, stored: Collection[bytes] | None) -> dict[bytes, bool]:
        """Digests of the prefixes that a chunk at `start` may have been encoded behind, the best first, and whether
        each is all that precedes the chunk here.

        Args:
            stored: digests of the prefixes that it was encoded behind; None where that is not known.
        """
        fitting = {}
        # The digest of all that precedes a chunk takes longer than the rest: few chunks are stored behind such.
        if offset == 0 and (start in self._behind or stored is None or not self._usual.issuperset(stored)):
            fitting[self._digest(start)] = True
        fitting |= {self._digest(place): False for place in self._behind if place != start}
        return fitting | {NEUTRAL: False}

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
