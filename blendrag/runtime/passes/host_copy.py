"""Computed KV on its way from the device to host memory, while the next forward runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blendrag.store import KVEntry
from blendrag.store.entry import host_memory

_streams: dict[torch.device, torch.cuda.Stream] = {}


class HostCopy:
    """An entry that is being copied; on the CPU it is complete at once.

    Args:
        k, v: of each layer, [tokens, kv heads, head size]; the current stream writes them.

    Attributes:
        nbytes: size of the entry.
    """

    def __init__(self, k: Sequence[torch.Tensor], v: Sequence[torch.Tensor]) -> None:
        device, shape = k[0].device, (len(k), *k[0].shape)
        each = sum(layer.nbytes for layer in k)
        both = host_memory(2 * each, pin=device.type == "cuda").view(k[0].dtype)
        half = len(both) // 2
        self._entry = KVEntry(both[:half].view(shape), both[half:].view(shape))
        self.nbytes = 2 * each
        self._source = [*k, *v]  # the device's memory stays theirs until all is copied
        self._arrived: torch.cuda.Event | None = None
        if device.type != "cuda":
            self._copy()
            return
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side = _streams[device]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            self._copy()
            self._arrived = side.record_event()

    def entry(self) -> KVEntry:
        """The entry, complete, in host memory."""
        if self._arrived is not None:
            self._arrived.synchronize()
        self._source = []
        return self._entry

    def _copy(self) -> None:
        for target, source in zip([*self._entry.k, *self._entry.v], self._source, strict=True):
            target.copy_(source, non_blocking=True)
