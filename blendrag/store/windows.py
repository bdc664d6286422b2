"""Hashes of all windows of 16 tokens of a prompt, and a filter that says which of them can be known."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from blendrag.errors import StoreError
from blendrag.store.keys import TokenIds

WINDOW = 16
"""Tokens in a window."""

Ids = npt.NDArray[np.uint32]
Places = npt.NDArray[np.intp]

_BASE, _LAST, _SECOND = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35
_MASK = 0xFFFFFFFF
_POWERS = [(span, np.uint32(pow(_BASE, span, 2**32))) for span in (1, 2, 4, 8)]
_WEIGHTS = [pow(_BASE, WINDOW - 1 - at, 2**32) * _LAST % 2**32 for at in range(WINDOW)]
_NO_ID = np.uint32(_MASK)
MAX_ID = 2**31 - 1

_BITS_FRESH, _BITS_FULL = 64, 32  # bits for each hash, at least
_SMALLEST = 16  # log2 of bits


def prompt_ids(ids: TokenIds) -> Ids:
    """Token ids as 32-bit numbers, [tokens]; what can be no token id becomes one that no chunk has.

    Half of a look-up's time is spent here, so lists take the quickest way that is known: `array`, which
    is three times as fast as `numpy.array`.

    Raises:
        StoreError: no flat sequence of whole numbers.
    """
    if isinstance(ids, (list, tuple)):
        try:
            return np.frombuffer(array("I", ids), np.uint32)
        except OverflowError:
            ids = [number if 0 <= number <= MAX_ID else _MASK for number in map(operator.index, ids)]
            return np.array(ids, np.uint32)
        except TypeError:
            pass
    wide = np.asarray(ids)
    if wide.ndim != 1 or (wide.size and wide.dtype.kind not in "iu"):
        raise StoreError("token ids must be a flat sequence of whole numbers: pass what the tokenizer returned")
    known = wide.astype(np.uint32)
    if wide.size and (wide.min() < 0 or wide.max() > MAX_ID):
        known[(wide < 0) | (wide > MAX_ID)] = _NO_ID
    return known


def chunk_bytes(ids: TokenIds) -> bytes:
    """Token ids of a chunk, four bytes each, little-endian.

    Raises:
        StoreError: no token ids.
    """
    array = prompt_ids(ids)
    if array.size and int(array.max()) > MAX_ID:
        raise StoreError("a chunk's token ids must be between 0 and 2**31 - 1: pass what the tokenizer returned")
    return array.astype("<u4", copy=False).tobytes()


def window_hash(tokens: Iterable[int]) -> int:
    """Rabin-Karp hash of one window: a polynomial modulo 2**32, whose upper bits are then mixed with all others."""
    value: int = sum(map(operator.mul, tokens, _WEIGHTS))
    return value & _MASK


def window_hashes(ids: Ids) -> Ids:
    """`window_hash` of each window, [tokens - 15]; windows double in length four times."""
    hashes = ids
    for span, power in _POWERS:
        longer = hashes[:-span] * power
        longer += hashes[span:]
        hashes = longer
    hashes *= np.uint32(_LAST)
    return hashes


class HashFilter:
    """A Bloom filter of hashes (Bloom, 1970), two bits each, small enough for a core's L2 cache at 100,000 of them.

    Hashes cannot be taken out; `full` says when to make a new one.
    """

    def __init__(self, hashes: Sequence[int] = ()) -> None:
        self._log2 = max(_SMALLEST, (_BITS_FRESH * len(hashes)).bit_length())
        known = np.array(hashes, np.uint32)
        bits = np.zeros(2**self._log2, np.uint8)
        bits[self._slots(known)] = bits[self._slots(known * np.uint32(_SECOND))] = 1
        self._bits = bytearray(np.packbits(bits, bitorder="little"))
        self._view = np.frombuffer(self._bits, np.uint8)
        self._room: int = 2**self._log2 // _BITS_FULL - len(hashes)

    @property
    def full(self) -> bool:
        """Whether more hashes would make it say yes too often."""
        return self._room <= 0

    def add(self, value: int) -> None:
        """Adds a hash."""
        for mixed in (value, (value * _SECOND) & _MASK):
            slot = mixed >> (32 - self._log2)
            self._bits[slot >> 3] |= 1 << (slot & 7)
        self._room -= 1

    def possible(self, hashes: Ids) -> Places:
        """Places of all hashes that were added, in order, and of at most one in 250 others."""
        places = self._hits(hashes)
        return places[self._hits(hashes[places] * np.uint32(_SECOND))]

    def _hits(self, hashes: Ids) -> Places:
        slots = self._slots(hashes)
        found = self._view.take(slots >> np.uint32(3))
        found >>= slots.astype(np.uint8) & np.uint8(7)
        found &= np.uint8(1)
        return found.view(np.bool_).nonzero()[0]

    def _slots(self, hashes: Ids) -> Ids:
        slots: Ids = hashes >> np.uint32(32 - self._log2)
        return slots
