"""The KV that a pass attends to: stored entries moved to their places, fresh rows put in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from blendrag.runtime.messages import Placement
from blendrag.runtime.model.blend_model import BlendModel
from blendrag.runtime.model.rotation import NoRotation, Rotation
from blendrag.runtime.passes.forward import Part
from blendrag.store import KVEntry

if TYPE_CHECKING:
    from blendrag.runtime.passes.device_loader import DeviceLoader
    from blendrag.runtime.passes.device_tier import DeviceTier
    from blendrag.runtime.passes.drift import Drift
    from blendrag.runtime.passes.paged_reader import CachedPrefix


class Context:
    """The KV of a prompt's first `tokens` tokens, one layer at a time.

    Args:
        keep_bytes: memory in which layers are kept, so that a second pass need not load and rotate again (CPU).
        tier: where entries on the device come from (CUDA).
        cached: leading tokens that are read from vLLM's paged cache; no entry stands among them.

    Attributes:
        stored: bool [tokens]; True where an entry stands in, or the paged cache.
    """

    def __init__(self, model: BlendModel, tokens: int, entries: Sequence[tuple[Placement, KVEntry]],
                 keep_bytes: int = 0, tier: DeviceTier | None = None, cached: CachedPrefix | None = None) -> None:
        self.model = model
        self.tokens = tokens
        self.entries = entries
        self.cached = cached
        stored = torch.zeros(tokens, dtype=torch.bool)
        for placement, _ in entries:
            stored[placement.start : placement.end] = True
        self._places = stored.nonzero()[:, 0].to(model.device)
        stored[: self.cached_tokens] = True
        self.stored = stored.to(model.device)
        self._keep_bytes = keep_bytes
        self._tier = tier
        self._angles: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._loader = self._device_loader(tier) if model.device.type == "cuda" else None
        self._earlier: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._retained: dict[int, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {}

    @property
    def cached_tokens(self) -> int:
        """Leading tokens that are read from vLLM's paged cache."""
        return self.cached.tokens if self.cached is not None else 0

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K (rotated) and V of a layer, [tokens, kv heads, head size]; of no meaning where there is none.

        Rows that were retained stand in place of stored ones; a kept layer also holds all that earlier passes merged
        into it.
        """
        if index in self._kept:
            return self._kept[index]
        k, v = self._loader.layer(index) if self._loader is not None else self._load(index)
        if self.cached is not None:
            k[: self.cached.tokens], v[: self.cached.tokens] = self.cached.layer(index, self.model.layers[index].group)
        for positions, fresh_k, fresh_v in self._retained.get(index, ()):
            k[positions], v[positions] = fresh_k, fresh_v
        if k.nbytes + v.nbytes <= self._keep_bytes:
            self._keep_bytes -= k.nbytes + v.nbytes
            self._kept[index] = k, v
        return k, v

    def retain(self, index: int, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Lets fresh rows of a layer stand in for stored ones in later passes."""
        if index in self._kept:
            kept_k, kept_v = self._kept[index]
            kept_k[positions], kept_v[positions] = k, v
        else:
            self._retained.setdefault(index, []).append((positions, k.clone(), v.clone()))

    def merged(self, index: int, part: Part, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
               drift: Drift | None = None, *, aside: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer with the rows' fresh ones put in, earlier parts' rows included.

        Args:
            positions: int64 [rows], of the part's rows.
            k, v: the part's rows, [rows, kv heads, head size].
            drift: moves stored KV along with that of the rows.
            aside: later passes find the layer as it was.
        """
        all_k, all_v = self.layer(index)
        if index in self._earlier:
            before, before_k, before_v = self._earlier[index]
            positions, k, v = torch.cat([before, positions]), torch.cat([before_k, k]), torch.cat([before_v, v])
        # With drift, the parts that follow compare with what is stored, too.
        if index in self._kept and (aside or (drift is not None and not part.last)):
            all_k, all_v = all_k.clone(), all_v.clone()
        if drift is not None:
            drift.apply(positions, k, v, all_k, all_v, self.model.layers[index].rotation)
        all_k.index_copy_(0, positions, k)
        all_v.index_copy_(0, positions, v)
        if part.last:
            self._earlier.pop(index, None)
        else:
            self._earlier[index] = (positions, k.clone(), v.clone())
        return all_k, all_v

    def _device_loader(self, tier: DeviceTier | None) -> DeviceLoader | None:
        from blendrag.runtime.passes.device_loader import DeviceLoader
        from blendrag.runtime.passes.triton_gather import Gather

        takes = Gather.takes(self.entries, self.model.dtype)
        return DeviceLoader(self.model, self.tokens, self.entries, tier) if takes else None

    def _load(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        attention, rotation = self.model.layers[index].attention, self.model.layers[index].rotation
        shape = (self.tokens, attention.num_kv_heads, attention.head_size)
        k = torch.zeros(shape, dtype=self.model.dtype, device=self.model.device)
        v = torch.zeros_like(k)
        if self._tier is not None:
            self._tier.wait(index)
        if self.entries:
            keys = torch.cat([self._fetch(entry.k, index, placement) for placement, entry in self.entries])
            k.index_copy_(0, self._places, self._rotated(rotation, keys))
            for placement, entry in self.entries:
                v[placement.start : placement.end] = self._fetch(entry.v, index, placement)
        return k, v

    def _rotated(self, rotation: Rotation | NoRotation, keys: torch.Tensor) -> torch.Tensor:
        if isinstance(rotation, NoRotation):
            return keys
        if id(rotation) not in self._angles:
            self._angles[id(rotation)] = rotation.angles(self._places)
        return rotation.apply(keys, *self._angles[id(rotation)])

    def _fetch(self, tensor: torch.Tensor, index: int, placement: Placement) -> torch.Tensor:
        piece = tensor[index, placement.offset : placement.offset + placement.end - placement.start]
        return piece.to(self.model.device, self.model.dtype, non_blocking=True)
