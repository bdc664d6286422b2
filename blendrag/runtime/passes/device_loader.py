"""Loads the stored KV of one prompt on a CUDA device, a layer at a time and one layer ahead."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blendrag.runtime.messages import Placement
from blendrag.runtime.model.blend_model import BlendModel
from blendrag.runtime.passes.device_tier import DeviceTier
from blendrag.runtime.passes.triton_gather import Gather
from blendrag.store import KVEntry

_SIDE_PROGRAMS = 32
"""Of the kernel that reads ahead, per head: enough to keep the bus busy, and few beside the pass itself."""


class DeviceLoader:
    """Reads entries from the device tier, and from page-locked host memory what does not fit there.

    Two layers of a prompt are on the device at a time, beside the tier: one that is used, and the next one where it
    comes from host memory.
    """

    def __init__(self, model: BlendModel, tokens: int, entries: Sequence[tuple[Placement, KVEntry]],
                 tier: DeviceTier | None) -> None:
        self._model = model
        self._tokens = tokens
        self._tier = tier
        self._gather = Gather(entries, model.device)
        self._ahead: tuple[int, torch.Tensor, torch.Tensor, torch.cuda.Event] | None = None
        self._side: torch.cuda.Stream | None = None
        if not all(entry.k.is_cuda for _, entry in entries):
            self._side = torch.cuda.Stream(model.device)  # type: ignore[no-untyped-call]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K (rotated) and V of a layer, [tokens, kv heads, head size]; not initialised where nothing is stored."""
        if self._tier is not None:
            self._tier.wait(index)
        if self._ahead is not None and self._ahead[0] == index:
            _, k, v, event = self._ahead
            torch.cuda.current_stream(self._model.device).wait_event(event)
        else:
            k, v = self._empty(index)
            self._gather.layer(index, self._model.layers[index].rotation, k, v)
        self._ahead = None
        if self._side is not None and index + 1 < len(self._model.layers):
            self._read_ahead(index + 1, self._side)
        return k, v

    def _read_ahead(self, index: int, side: torch.cuda.Stream) -> None:
        k, v = self._empty(index)
        side.wait_stream(torch.cuda.current_stream(self._model.device))
        with torch.cuda.stream(side):
            if self._tier is not None:
                self._tier.wait(index)
            self._gather.layer(index, self._model.layers[index].rotation, k, v, programs=_SIDE_PROGRAMS)
            for tensor in (k, v):
                tensor.record_stream(side)
            self._ahead = index, k, v, side.record_event()

    def _empty(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        attention = self._model.layers[index].attention
        shape = (self._tokens, attention.num_kv_heads, attention.head_size)
        k = torch.empty(shape, dtype=self._model.dtype, device=self._model.device)
        return k, torch.empty_like(k)
