"""Compares stored chunks with a prompt, token by token, at the places where one of their windows seems to be."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter

from blendrag.store.windows import WINDOW, Ids, Places

LEFT_EDGE = 8
"""Tokens at the beginning of a chunk that may differ in the prompt: BPE merges them with what precedes."""

PARTIAL = 4
"""Of the chunks that share an anchor, so many, the longest, are found in part, or within a shorter one of them; the
others only in full."""

_WORK = 2**12
_EXACT, _PART, _TOKENS = 1, 6, 64  # work of a comparison, in units of about 0.3 us


@dataclass(slots=True, eq=False)
class Content:
    """One text, however often it is stored.

    Attributes:
        raw: token ids, four bytes each, little-endian.
        anchor: where its anchor begins.
        hash: of its anchor.
        single: no other chunk has this anchor, and it cannot occur close to itself.
        variants: keys, by the digest of what the text was encoded behind; replaced, never changed, as matches
            hand it out.
    """

    raw: bytes
    tokens: int
    anchor: int = 0
    hash: int = 0
    single: bool = True
    variants: Mapping[bytes, str] = field(default_factory=dict)


Run = tuple[int, int, int, Content]
"""Tokens that a prompt and a content have in common: start and end in the prompt, offset in the content, content."""


class Look:
    """One look at a prompt.

    Attributes:
        work: what comparisons may still cost; only input that is made for it uses it up, in some milliseconds,
            and what was not looked at then is not found.
    """

    def __init__(self, prompt: Ids) -> None:
        self.work = len(prompt) // 2 + _WORK
        self._tokens = len(prompt)
        self._raw = prompt.tobytes()

    def singles(self, contents: Mapping[int, Content], places: Places, hashes: Ids) -> list[Run]:
        """The runs around all anchors that belong to one content.

        Args:
            contents: by the hash of their anchor.
            places: where in the prompt an anchor may be.
            hashes: of the windows at `places`.
        """
        runs: list[Run] = []
        known, equal = contents.get, self._raw.startswith
        for place, value in zip(places.tolist(), hashes.tolist(), strict=True):
            content = known(value)
            if content is None:
                continue
            origin = place - content.anchor
            if origin >= 0 and equal(content.raw, 4 * origin):
                runs.append((origin, origin + content.tokens, 0, content))
            elif run := self._around(content, place):
                runs.append(run)
            if self.work < 0:
                break
        return runs

    def shared(self, buckets: Mapping[int, Sequence[Content]], places: Places, hashes: Ids) -> list[Run]:
        """The longest run at each place of the anchors that belong to several contents, or that repeat.

        What would begin within an anchor's last run is looked at only if it is longer.

        Args:
            buckets: contents by the hash of their anchor, the longest first.
        """
        runs: list[Run] = []
        order = hashes.argsort(kind="stable")
        where, values = places[order].tolist(), hashes[order].tolist()
        at = 0
        while at < len(values) and self.work >= 0:
            end = bisect_right(values, values[at], at)
            if bucket := buckets.get(values[at]):
                self._shared(bucket, where[at:end], runs)
            at = end
        return runs

    def _shared(self, bucket: Sequence[Content], places: list[int], runs: list[Run]) -> None:
        nearest = min(content.anchor for content in bucket)
        at, behind, length = 0, 0, 0
        while at < len(places) and self.work >= 0:
            if places[at] >= behind:
                best = self._longest(bucket, places[at], 0)
            elif bucket[0].tokens > length:
                best = self._longest(bucket[:PARTIAL], places[at], length)
            else:
                at = bisect_left(places, behind, at)
                continue
            if best:
                runs.append(best)
                behind, length = best[1] + nearest, best[1] - best[0]
            at += 1

    def _longest(self, bucket: Sequence[Content], place: int, length: int) -> Run | None:
        best: Run | None = None
        for rank, content in enumerate(bucket):
            if content.tokens <= length:  # as are all that follow
                break
            origin = place - content.anchor
            self.work -= _EXACT
            run: Run | None = None
            if origin >= 0 and self._raw.startswith(content.raw, 4 * origin):
                run = origin, origin + content.tokens, 0, content
            elif rank < PARTIAL:
                run = self._around(content, place)
            if run and run[1] - run[0] > length:
                best, length = run, run[1] - run[0]
        return best

    def _around(self, content: Content, place: int) -> Run | None:
        """The run of equal tokens around an anchor at `place`; None where it is none, or lacks too much at the left."""
        raw, anchor, origin = content.raw, content.anchor, place - content.anchor
        low = origin if origin > 0 else 0
        high = origin + content.tokens
        if high > self._tokens:
            high = self._tokens
        self.work -= _PART + (high - low) // _TOKENS
        wrong = _difference(raw[4 * (low - origin) : 4 * anchor], self._raw[4 * low : 4 * place])
        start = low + (wrong.bit_length() + 31) // 32
        if start - origin > LEFT_EDGE:
            return None
        # Most often only the last tokens differ, if any: the quickest way is to compare the others as a whole.
        at, stop = 4 * anchor, 4 * (high - origin)
        if stop - 16 > at and self._raw.startswith(memoryview(raw)[at : stop - 16], 4 * place):
            at = stop - 16
        wrong = _difference(raw[at:stop], self._raw[4 * origin + at : 4 * high])
        end = origin + at // 4 + ((wrong & -wrong).bit_length() - 1) // 32 if wrong else high
        return (start, end, start - origin, content) if end >= place + WINDOW else None


def _difference(a: bytes, b: bytes) -> int:
    """Tokens bit by bit, the first in the lowest bits: of those that are equal none is set.

    For a few hundred tokens this takes half the time of numpy.
    """
    return int.from_bytes(a, "little") ^ int.from_bytes(b, "little")


def without_overlaps(runs: list[Run]) -> list[Run]:
    """Those runs, in order, that overlap no longer one that is kept, nor an equally long one before them.

    Of runs of the same tokens the one of the shorter content is kept.
    """
    runs.sort(key=itemgetter(0))
    if all(left[1] <= right[0] for left, right in pairwise(runs)):
        return runs
    kept: list[Run] = []
    for run in sorted(runs, key=lambda run: (run[0] - run[1], run[0], run[3].tokens, run[3].raw)):
        at = bisect_right(kept, run[0], key=itemgetter(0))
        if (at == 0 or kept[at - 1][1] <= run[0]) and (at == len(kept) or run[1] <= kept[at][0]):
            kept.insert(at, run)
    return kept
