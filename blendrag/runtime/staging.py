"""Copies stored KV from page-locked memory to a CUDA device while the pass already computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blendrag.runtime.messages import Placement
from blendrag.store import KVEntry

_GROUPS = 8


class Staging:
    """Device copies of entries, arriving in groups of layers, the first layers first.

    Attributes:
        entries: the entries on the device; a layer may be read after `wait(layer)`.
    """

    def __init__(self, entries: Sequence[tuple[Placement, KVEntry]], device: torch.device) -> None:
        self.entries = [(placement, KVEntry(torch.empty_like(entry.k, device=device),
                                            torch.empty_like(entry.v, device=device))) for placement, entry in entries]
        layers = entries[0][1].k.shape[0]
        self._group = -(-layers // _GROUPS)
        self._arrived: list[torch.cuda.Event] = []
        stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for start in range(0, layers, self._group):
                part = slice(start, start + self._group)
                for (_, source), (_, target) in zip(entries, self.entries, strict=True):
                    target.k[part].copy_(source.k[part], non_blocking=True)
                    target.v[part].copy_(source.v[part], non_blocking=True)
                self._arrived.append(stream.record_event())

    @staticmethod
    def bytes_needed(entries: Sequence[tuple[Placement, KVEntry]]) -> int:
        """Device memory that copies of these entries take."""
        return sum(entry.nbytes for _, entry in entries)

    def wait(self, layer: int) -> None:
        """Lets the current stream go on when the layer has arrived."""
        torch.cuda.current_stream().wait_event(self._arrived[layer // self._group])
