"""Sequences in a text by one window of each: the quick way of `blendrag.occurrences`, for ordinary input."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from blendrag.store.windows import WINDOW, HashFilter, window_hashes

_BLOCK = 1 << 20
"""Positions that are searched at a time."""
_WORK_PER_ELEMENT = 4
_COMPARISON = 64
"""What a comparison costs beside its length, in elements compared."""


class Anchors:
    """Needles of 16 elements and more, each known by the 16 in its middle: what sequences have in common is most often
    at their ends.

    Args:
        needles: code points or token ids.
    """

    def __init__(self, needles: Sequence[npt.NDArray[np.uint32]]) -> None:
        self._lengths = [len(needle) for needle in needles]
        self._contents = [needle.tobytes() for needle in needles]
        self._offsets = [(length - WINDOW) // 2 for length in self._lengths]
        windows = [needle[at : at + WINDOW] for needle, at in zip(needles, self._offsets, strict=True)]
        hashes = window_hashes(np.concatenate(windows))[::WINDOW].tolist()
        self._filter = HashFilter(hashes)
        self._numbers: dict[int, list[int]] = {}
        for number, value in enumerate(hashes):
            self._numbers.setdefault(value, []).append(number)

    def find(self, haystack: npt.NDArray[np.uint32]) -> list[int] | None:
        """The first position of each needle, or -1; None where windows occur so often that it would cost too much."""
        places = [-1] * len(self._lengths)
        if len(haystack) < WINDOW:
            return places
        content = haystack.tobytes()
        work = _WORK_PER_ELEMENT * (len(haystack) + sum(self._lengths))
        for begin in range(0, len(haystack) - WINDOW + 1, _BLOCK):
            hashes = window_hashes(haystack[begin : begin + _BLOCK + WINDOW - 1])
            possible = self._filter.possible(hashes)
            for at, value in zip((possible + begin).tolist(), hashes[possible].tolist(), strict=True):
                for number in self._numbers.get(value, ()):
                    start = at - self._offsets[number]
                    if places[number] >= 0 or start < 0:
                        continue
                    work -= self._lengths[number] + _COMPARISON
                    if work < 0:
                        return None
                    if content.startswith(self._contents[number], 4 * start):
                        places[number] = start
        return places
