"""The store's tier on a CUDA device: recently used entries, so that a prompt of known chunks copies nothing.

Copies from page-locked host memory are queued when a pass first needs a layer, the first layers first, and arrive
while the pass already computes.  What does not fit is read from host memory layer by layer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import torch

from blendrag.store import KVEntry

_GROUPS = 8
_AUTO_BYTES = 8 * 2**30


class DeviceTier:
    """Entries on the device by key, the least recently used ones leave first.

    Args:
        budget: bytes; None for half of what is free when the first entries come, and 8 GiB at most.
    """

    def __init__(self, device: torch.device, budget: int | None = None) -> None:
        self.device = device
        self._budget = budget
        self._held: OrderedDict[str, KVEntry] = OrderedDict()
        self._bytes = 0
        self._waiting: dict[str, tuple[KVEntry, KVEntry]] = {}
        self._copying: tuple[list[tuple[KVEntry, KVEntry]], torch.cuda.Event] | None = None
        self._arrived: list[torch.cuda.Event] = []
        self._group = 1

    def get(self, key: str) -> KVEntry | None:
        """The entry, where it is on the device."""
        return self._held.get(key)

    def hold(self, entries: Mapping[str, KVEntry]) -> dict[str, KVEntry]:
        """The entries, those that fit on the device; a layer of these may be read after `wait(layer)`.

        Entries that were returned before stay valid until the next call.
        """
        if self._budget is None:
            self._budget = min(_AUTO_BYTES, torch.cuda.mem_get_info(self.device)[0] // 2)
        self._settle()
        for key in entries:
            if key in self._held:
                self._held.move_to_end(key)
        return {key: self._place(key, entry, entries) for key, entry in entries.items()}

    def wait(self, layer: int) -> None:
        """Lets the current stream go on when the layer of all entries has arrived."""
        if self._waiting:
            self._copy()
        if self._arrived:
            torch.cuda.current_stream(self.device).wait_event(self._arrived[layer // self._group])

    def drop(self, key: str) -> None:
        """Lets go of an entry, where it is on the device."""
        if key in self._held:
            self._settle()
            self._remove(key)

    def clear(self) -> None:
        """Lets go of all entries."""
        self._settle()
        for key in list(self._held):
            self._remove(key)
        if self._copying is not None:
            self._copying[1].synchronize()
            self._copying = None

    def _settle(self) -> None:
        """The pass before may have failed early: what it never waited for is copied, or waited for, from here on."""
        if self._arrived:
            torch.cuda.current_stream(self.device).wait_event(self._arrived[-1])
            self._arrived = []

    def _remove(self, key: str) -> None:
        self._bytes -= self._held.pop(key).nbytes
        self._waiting.pop(key, None)

    def _place(self, key: str, entry: KVEntry, needed: Mapping[str, KVEntry]) -> KVEntry:
        if key in self._held:
            return self._held[key]
        assert self._budget is not None
        while self._bytes + entry.nbytes > self._budget:
            oldest = next(iter(self._held), None)
            if oldest is None or oldest in needed:
                return entry
            self._remove(oldest)
        copy = KVEntry(torch.empty_like(entry.k, device=self.device), torch.empty_like(entry.v, device=self.device))
        self._held[key] = copy
        self._bytes += copy.nbytes
        self._waiting[key] = entry, copy
        return copy

    def _copy(self) -> None:
        if self._copying is not None:
            self._copying[1].synchronize()  # long done: only now may what it read be overwritten
        waiting = list(self._waiting.values())
        layers = waiting[0][0].k.shape[0]
        self._group = -(-layers // _GROUPS)
        arrived = []
        stream: torch.cuda.Stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for start in range(0, layers, self._group):
                part = slice(start, start + self._group)
                for source, target in waiting:
                    target.k[part].copy_(source.k[part], non_blocking=True)
                    target.v[part].copy_(source.v[part], non_blocking=True)
                arrived.append(stream.record_event())
        self._waiting, self._arrived, self._copying = {}, arrived, (waiting, arrived[-1])
