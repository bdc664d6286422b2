"""Page-locked host memory: taken from the system in large pieces, since locking takes long, and handed out in small."""

from __future__ import annotations

import ctypes
import threading
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable

import torch

_ALIGNMENT = 4096
_SLAB_BYTES = 2**28


class Arena:
    """Cuts tensors from slabs; what a tensor had is free again when nothing refers to its memory any more.

    Args:
        allocate: a slab of so many bytes, uint8 [bytes].
        slab_bytes: size of a slab; what is larger gets one of its own.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor], slab_bytes: int = _SLAB_BYTES) -> None:
        self._allocate = allocate
        self._slab_bytes = slab_bytes
        self._lock = threading.Lock()
        self._slabs: dict[int, torch.Tensor] = {}
        self._free: list[tuple[int, int]] = []  # start and end address of each gap, ascending
        self._returned: deque[tuple[int, int]] = deque()  # by finalisers, which may run in the midst of anything

    def take(self, size: int) -> torch.Tensor:
        """Memory of so many bytes, uint8 [size].

        Raises:
            RuntimeError: the system has no such memory left.
        """
        room = aligned(size)
        with self._lock:
            self._collect()
            start = self._cut(room)
            if start is None:
                self._add(max(room, self._slab_bytes))
                start = self._cut(room)
                assert start is not None
        memory = (ctypes.c_char * size).from_address(start)
        weakref.finalize(memory, self._returned.append, (start, start + room)).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)

    @property
    def slabs(self) -> int:
        """How many slabs there are."""
        return len(self._slabs)

    def _add(self, size: int) -> None:
        slab = self._allocate(size)
        self._slabs[slab.data_ptr()] = slab
        insort(self._free, (slab.data_ptr(), slab.data_ptr() + size))

    def _cut(self, room: int) -> int | None:
        """Takes the first gap that is large enough."""
        for number, (start, end) in enumerate(self._free):
            if end - start >= room:
                self._free[number : number + 1] = [(start + room, end)] if end - start > room else []
                return start
        return None

    def _collect(self) -> None:
        """Joins what has come back with the gaps beside it, within slabs; all but one that are empty go."""
        if not self._returned:
            return
        while self._returned:
            insort(self._free, self._returned.popleft())
        gaps: list[tuple[int, int]] = []
        for start, end in self._free:
            if gaps and gaps[-1][1] == start and start not in self._slabs:
                gaps[-1] = gaps[-1][0], end
            else:
                gaps.append((start, end))
        empty = [gap for gap in gaps if gap[0] in self._slabs and gap[1] - gap[0] == len(self._slabs[gap[0]])]
        for gap in empty[1:]:
            gaps.remove(gap)
            del self._slabs[gap[0]]
        self._free = gaps


def aligned(size: int) -> int:
    """What so many bytes take of a slab."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


PAGE_LOCKED = Arena(lambda size: torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True))
"""This process' page-locked memory."""
