"""Where many sequences first occur in one: characters in a text, or token ids in a prompt.

The work grows with the input's length times the logarithm of the longest sequence, whatever the input: equal
characters, sequences that begin alike and sequences that contain each other cost no more than that.  Ordinary input is
done in a few looks at it (`blendrag.anchors`).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from blendrag.anchors import Anchors
from blendrag.store.windows import WINDOW

_Words = npt.NDArray[np.uint64]
_Numbers = npt.NDArray[np.int64]

_BLOCK = 1 << 16
"""Positions that are searched at a time, at least: hashes of all window sizes are held for them."""
_FILTER_BITS = 20
# Random for each process, so that no input can be made to collide.
_FACTORS = [np.uint64(secrets.randbits(64) | 1) for _ in range(4)]


def find_occurrences(haystack: npt.NDArray[np.uint32], needles: Sequence[npt.NDArray[np.uint32]]) -> list[int]:
    """The first position of each needle in the haystack, or -1.

    Args:
        haystack: code points or token ids.
        needles: likewise; they may be equal, overlap and contain each other.  An empty one is at 0.
    """
    return Occurrences(needles).find(haystack)


def code_points(text: str) -> npt.NDArray[np.uint32]:
    """A text as `find_occurrences` takes it; halves of surrogate pairs count as characters."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


class Occurrences:
    """Needles that are looked for in several haystacks, one after the other; as `find_occurrences`."""

    def __init__(self, needles: Sequence[npt.NDArray[np.uint32]]) -> None:
        self._needles = [np.ascontiguousarray(needle, np.uint32) for needle in needles]
        self._lengths = np.array([len(needle) for needle in needles], np.int64)
        self._short = np.flatnonzero((self._lengths > 0) & (self._lengths < WINDOW))
        self._long = np.flatnonzero(self._lengths >= WINDOW)

    def find(self, haystack: npt.NDArray[np.uint32]) -> list[int]:
        """The first position of each needle, or -1."""
        places = np.where(self._lengths == 0, 0, -1)
        haystack = np.ascontiguousarray(haystack, np.uint32)
        if len(self._short):
            places[self._short] = self._short_ones.find(haystack)
        if len(self._long):
            quick = self._anchors.find(haystack)
            places[self._long] = self._long_ones.find(haystack) if quick is None else quick
        result: list[int] = places.tolist()
        return result

    @cached_property
    def _anchors(self) -> Anchors:
        return Anchors([self._needles[number] for number in self._long])

    @cached_property
    def _short_ones(self) -> _Dictionary:
        return _Dictionary([self._needles[number] for number in self._short])

    @cached_property
    def _long_ones(self) -> _Dictionary:
        return _Dictionary([self._needles[number] for number in self._long])


@dataclass(frozen=True)
class _Level:
    """Prefixes of needles that end with a window of 2**k elements.

    Attributes:
        keys: their hashes, sorted.
        first: the number of the first of them among the prefixes of all levels.
        filter: which low bits of a hash occur in `keys`.
    """

    keys: _Words
    first: int
    filter: npt.NDArray[np.bool_]

    def find(self, hashes: _Words) -> tuple[_Numbers, _Numbers]:
        """Which of the hashes are prefixes of needles, and the numbers of these prefixes."""
        likely = np.flatnonzero(self.filter[(hashes & np.uint64((1 << _FILTER_BITS) - 1)).astype(np.int64)])
        among = hashes[likely]
        at = np.minimum(np.searchsorted(self.keys, among), len(self.keys) - 1)
        equal = self.keys[at] == among
        return likely[equal], at[equal] + self.first


class _Dictionary:
    """Needles as a dictionary that is looked up at every position at once.

    A needle's length is a sum of powers of two; its prefixes at the partial sums, the largest power first, are the
    dictionary's nodes.  From a position one descends through the powers and takes each step that leads to a node.  The
    node where that ends is at least as long as the longest needle at that position, so this needle is a prefix of
    the node, and can be noted there in advance (longest prefix matching by binary search over lengths).
    """

    def __init__(self, needles: list[npt.NDArray[np.uint32]]) -> None:
        self._needles = needles
        self._lengths = np.array([len(needle) for needle in needles], np.int64)
        self._depth = int(self._lengths.max()).bit_length()
        self._levels: list[_Level | None] = [None] * self._depth
        starts = np.cumsum(self._lengths) - self._lengths
        hashes = _window_hashes(np.concatenate(needles), self._depth)
        self._ends = np.zeros(len(needles), np.int64)  # the node of each whole needle
        node_starts, node_lengths = self._add_nodes(hashes, starts)
        # The longest node that is a proper prefix of each node, and the longest needle that is one, or the node itself.
        shorter = self._descend(hashes, node_starts, node_lengths - 1)
        whole = np.zeros(len(node_starts), bool)
        whole[self._ends] = True
        self._longest = _follow(shorter, whole)
        self._node_lengths = node_lengths
        self._inner = np.where(shorter >= 0, self._longest[shorter], -1)

    def find(self, haystack: npt.NDArray[np.uint32]) -> _Numbers:
        """The first position of each needle, or -1."""
        never = len(haystack)
        first = np.full(len(self._longest), never, np.int64)
        overlap = int(self._lengths.max()) - 1
        size = max(_BLOCK, 2 * overlap)
        for begin in range(0, max(1, len(haystack) - overlap), size - overlap):
            block = haystack[begin : begin + size]
            positions = np.arange(len(block))
            nodes = self._descend(_window_hashes(block, self._depth), positions, len(block) - positions)
            hits = np.flatnonzero(nodes >= 0)[::-1]  # the last assignment, the leftmost position, stays
            whole = self._longest[nodes[hits]]
            here = np.full(len(first), never, np.int64)
            here[whole[whole >= 0]] = hits[whole >= 0] + begin
            first = np.minimum(first, here)
        self._hand_down(first)
        places = first[self._ends]
        return np.where(places < never, self._verified(haystack, places), -1)

    def _add_nodes(self, hashes: list[_Words], starts: _Numbers) -> tuple[_Numbers, _Numbers]:
        """Makes the levels; returns where each node stands in the needles' joined text, and its length."""
        lengths, node_starts, node_lengths = self._lengths, [], []
        progress = np.zeros(len(lengths), np.int64)
        prefix = np.zeros(len(lengths), np.uint64)
        count = 0
        for power in reversed(range(self._depth)):
            stepping = np.flatnonzero(lengths >> power & 1)
            if not len(stepping):
                continue
            prefix[stepping] = _joined(prefix[stepping], hashes[power][starts[stepping] + progress[stepping]])
            progress[stepping] += 1 << power
            keys, one, node = np.unique(prefix[stepping], return_index=True, return_inverse=True)
            low_bits = np.zeros(1 << _FILTER_BITS, bool)
            low_bits[(keys & np.uint64(len(low_bits) - 1)).astype(np.int64)] = True
            self._levels[power] = _Level(keys, count, low_bits)
            self._ends[stepping] = node + count  # a later, lower power overwrites it
            node_starts.append(starts[stepping][one])
            node_lengths.append(progress[stepping][one])
            count += len(keys)
        return np.concatenate(node_starts), np.concatenate(node_lengths)

    def _descend(self, hashes: list[_Words], positions: _Numbers, limits: _Numbers) -> _Numbers:
        """The last node on the way down from each position, -1 where there is none.

        Args:
            hashes: window hashes of the text that positions are in.
            limits: the longest node that is allowed, for each position.
        """
        nodes = np.full(len(positions), -1, np.int64)
        progress = np.zeros(len(positions), np.int64)
        prefix = np.zeros(len(positions), np.uint64)
        for power, level in reversed(list(enumerate(self._levels))):
            if level is None:
                continue
            able = np.flatnonzero(progress + (1 << power) <= limits)
            at = positions[able] + progress[able]
            candidates = _joined(prefix[able], hashes[power][at])
            hit, number = level.find(candidates)
            going = able[hit]
            nodes[going] = number
            progress[going] += 1 << power
            prefix[going] = candidates[hit]
        return nodes

    def _hand_down(self, first: _Numbers) -> None:
        """Where a needle stands, the needles that it begins with stand, too: from the longest to the shortest."""
        whole = np.unique(self._ends)
        whole = whole[self._inner[whole] >= 0]
        order = whole[np.argsort(-self._node_lengths[whole], kind="stable")]
        borders = np.flatnonzero(np.diff(self._node_lengths[order])) + 1
        for alike in np.split(order, borders):
            np.minimum.at(first, self._inner[alike], first[alike])

    def _verified(self, haystack: npt.NDArray[np.uint32], places: _Numbers) -> _Numbers:
        """The places, each compared element by element: -1 should hashes have collided."""
        return np.array([place if np.array_equal(haystack[place : place + len(needle)], needle) else -1
                         for place, needle in zip(places.tolist(), self._needles, strict=True)], np.int64)


def _window_hashes(text: npt.NDArray[np.uint32], depth: int) -> list[_Words]:
    """Hashes of the windows of 1, 2, 4, ... elements at each position, as far as they fit; uint64."""
    hashes = [_mixed((text.astype(np.uint64) + np.uint64(1)) * _FACTORS[0])]
    for power in range(depth - 1):
        size = 1 << power
        last = hashes[-1]
        hashes.append(_joined(last[: max(0, len(last) - size)], last[size:]))
    return hashes


def _joined(left: _Words, right: _Words) -> _Words:
    return _mixed(left * _FACTORS[1] + right * _FACTORS[2])


def _mixed(words: _Words) -> _Words:
    words ^= words >> np.uint64(29)
    words *= _FACTORS[3]
    words ^= words >> np.uint64(32)
    return words


def _follow(shorter: _Numbers, whole: npt.NDArray[np.bool_]) -> _Numbers:
    """For each node the first whole needle on the way from it to ever shorter nodes, itself included; or -1."""
    # Each round doubles how far `ahead` looks, so that long chains take few.
    ahead = np.where(whole, np.arange(len(whole)), shorter)
    while True:
        further = np.where(ahead >= 0, ahead[ahead], -1)
        if np.array_equal(further, ahead):
            return ahead
        ahead = further
