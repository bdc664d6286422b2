"""Finds stored chunks in a prompt by their tokens alone, wherever they are.

Each chunk is known by one window of 16 of its tokens, its anchor.  A look-up hashes all windows of the
prompt (Rabin-Karp), keeps those that can be an anchor, and compares the chunk's tokens with the prompt's
around them.  What is reported was compared token by token: a hash that collides costs time, nothing else.
"""

from __future__ import annotations

import struct
from bisect import bisect_right, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter

import numpy as np

from blendrag.store import windows
from blendrag.store.keys import TokenIds
from blendrag.store.windows import WINDOW, HashFilter, Ids, chunk_bytes, prompt_ids

LEFT_EDGE = 8
"""Tokens at the beginning of a chunk that may differ in the prompt: BPE merges them with what precedes."""

PARTIAL = 4
"""Of the chunks that share an anchor, so many, the longest, are found in part; the others only in full."""

_WINDOW = struct.Struct(f"<{WINDOW}I")
_FEW = 8
_EXACT, _PART = 1, 8  # work of a comparison, in units of about 0.3 us
_WORK = 2**13


@dataclass(frozen=True)
class Match:
    """Tokens of a prompt that are tokens of a stored chunk.

    Attributes:
        start, end: where in the prompt.
        offset: of `start` in the chunk; `[offset, offset + end - start)` are the chunk's tokens.
        tokens: length of the stored chunk.
        variants: the chunk's keys, by the digest of what it was encoded behind.
    """

    start: int
    end: int
    offset: int
    tokens: int
    variants: Mapping[bytes, str]


@dataclass(slots=True, eq=False)
class _Content:
    """One text, however often it is stored.

    Attributes:
        raw: token ids, four bytes each, little-endian.
        anchor: where its anchor begins.
        hash: of its anchor.
        single: no other chunk has this anchor, and it cannot occur close to itself.
    """

    raw: bytes
    tokens: int
    anchor: int = 0
    hash: int = 0
    single: bool = True
    variants: dict[bytes, str] = field(default_factory=dict)


_Run = tuple[int, int, int, _Content]  # start, end, offset, content


class ContentIndex:
    """The stored chunks of one model and namespace, by their tokens.  Not thread-safe: its store holds a lock."""

    def __init__(self) -> None:
        self._contents: dict[bytes, _Content] = {}
        self._keys: dict[str, tuple[_Content, bytes]] = {}
        self._single: dict[int, _Content] = {}
        self._shared: dict[int, list[_Content]] = {}
        self._filter = HashFilter()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def add(self, key: str, prefix: bytes, ids: TokenIds | bytes) -> None:
        """Makes an entry findable, in place of another one of the same tokens and prefix.

        Chunks of fewer than 16 tokens are not found.

        Args:
            prefix: digest of what it was encoded behind.
            ids: the chunk's tokens, or their bytes: four each, little-endian.

        Raises:
            StoreError: no token ids.
        """
        self.remove(key)
        raw = ids if isinstance(ids, bytes) else chunk_bytes(ids)
        if len(raw) < 4 * WINDOW:
            return
        content = self._contents.get(raw)
        if content is None:
            content = self._contents[raw] = _Content(raw, len(raw) // 4)
            self._anchor(content)
        self._keys.pop(content.variants.get(prefix, ""), None)
        content.variants[prefix] = key
        self._keys[key] = content, prefix

    def remove(self, key: str) -> bool:
        """Forgets an entry; says whether there was one."""
        content, prefix = self._keys.pop(key, (None, b""))
        if content is None:
            return False
        del content.variants[prefix]
        if not content.variants:
            del self._contents[content.raw]
            self._release(content)
        return True

    def find(self, ids: TokenIds) -> list[Match]:
        """The stored chunks in a prompt, in order, without overlaps.

        A match is as long as chunk and prompt agree around the anchor.  It may begin up to 8 tokens
        behind the chunk's beginning, and end anywhere.  Where matches overlap, the longest counts, of
        equally long ones the first.

        Raises:
            StoreError: no token ids.
        """
        prompt = prompt_ids(ids)
        if len(prompt) < WINDOW or not self._keys:
            return []
        runs = list(self._runs(prompt))
        if any(left[1] > right[0] for left, right in pairwise(runs)):
            runs = _longest(runs)
        return [Match(start, end, offset, content.tokens, dict(content.variants))
                for start, end, offset, content in runs]

    def _runs(self, prompt: Ids) -> Iterator[_Run]:
        """The runs around the anchors in a prompt; of a shared anchor the longest."""
        hashes = windows.window_hashes(prompt)
        places = self._filter.possible(hashes)
        look = _Look(prompt)
        passed: dict[int, tuple[int, int]] = {}
        for place, value in zip(places.tolist(), hashes[places].tolist(), strict=True):
            content = self._single.get(value)
            if content and (run := look.around(content, place)):
                yield run
            if bucket := self._shared.get(value):
                # What would begin within the last run of this anchor is looked at only if it is longer.
                behind, length = passed.get(value, (0, 0))
                best = look.longest(bucket, place, length if place < behind else 0)
                if best:
                    yield best
                    passed[value] = best[1] + min(content.anchor for content in bucket), best[1] - best[0]
            if look.work < 0:  # after about 7 ms at 32,768 tokens: only where somebody means it
                return

    def _anchor(self, content: _Content) -> None:
        """Chooses the anchor: a window that no other chunk has for its own, and that occurs once in this chunk."""
        raw = content.raw
        first = min(LEFT_EDGE, (content.tokens - WINDOW) // 2)
        free: tuple[int, int] | None = None
        for offset in range(first, content.tokens - WINDOW + 1, WINDOW):
            tokens = _WINDOW.unpack_from(raw, 4 * offset)
            value = windows.window_hash(tokens)
            if value in self._single or value in self._shared:
                continue
            window = raw[4 * offset : 4 * (offset + WINDOW)]
            if len(set(tokens)) > _FEW and raw.find(window) == 4 * offset and raw.find(window, 4 * offset + 4) < 0:
                content.anchor, content.hash = offset, value
                self._single[value] = content
                break
            free = free or (offset, value)
        else:
            content.single = False
            content.anchor, content.hash = free or (first, windows.window_hash(_WINDOW.unpack_from(raw, 4 * first)))
            insort(self._shared.setdefault(content.hash, []), content, key=lambda other: -other.tokens)
        if self._filter.full:
            self._filter = HashFilter([*self._single, *self._shared])
        else:
            self._filter.add(content.hash)

    def _release(self, content: _Content) -> None:
        if content.single:
            del self._single[content.hash]
            return
        bucket = self._shared[content.hash]
        bucket.remove(content)
        if not bucket:
            del self._shared[content.hash]


class _Look:
    """Comparisons of chunks with one prompt, and how much work they may still be."""

    def __init__(self, prompt: Ids) -> None:
        self.work = len(prompt) // 2 + _WORK
        self._prompt = prompt
        self._raw = prompt.tobytes()

    def around(self, content: _Content, place: int, in_part: bool = True) -> _Run | None:
        """The run of equal tokens around an anchor at `place`; None where it is none, or lacks too much at the left."""
        origin = place - content.anchor
        self.work -= _EXACT
        if origin >= 0 and self._raw.startswith(content.raw, 4 * origin):
            return origin, origin + content.tokens, 0, content
        if not in_part:
            return None
        self.work -= _PART
        low, high = max(origin, 0), min(origin + content.tokens, len(self._prompt))
        chunk = np.frombuffer(content.raw, "<u4")
        wrong = (self._prompt[low:high] != chunk[low - origin : high - origin]).nonzero()[0]
        behind = int(wrong.searchsorted(place - low))
        start = low + int(wrong[behind - 1]) + 1 if behind else low
        end = low + int(wrong[behind]) if behind < len(wrong) else high
        if end < place + WINDOW or start - origin > LEFT_EDGE:
            return None
        return start, end, start - origin, content

    def longest(self, bucket: list[_Content], place: int, length: int) -> _Run | None:
        """The longest run of more than `length` tokens around an anchor that several chunks have."""
        best: _Run | None = None
        for rank, content in enumerate(bucket):
            if content.tokens <= length:  # as are all that follow
                break
            run = self.around(content, place, rank < PARTIAL)
            if run and run[1] - run[0] > length:
                best, length = run, run[1] - run[0]
        return best


def _longest(runs: list[_Run]) -> list[_Run]:
    """Those runs that overlap no longer one that is kept."""
    kept: list[_Run] = []
    for run in sorted(runs, key=lambda run: (run[0] - run[1], run[0])):
        at = bisect_right(kept, run[0], key=itemgetter(0))
        if (at == 0 or kept[at - 1][1] <= run[0]) and (at == len(kept) or run[1] <= kept[at][0]):
            kept.insert(at, run)
    return kept
