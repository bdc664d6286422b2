"""The KV that a pass attends to: stored entries moved to their places, fresh rows put in between."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blendrag.runtime.forward import Part
from blendrag.runtime.messages import Placement
from blendrag.runtime.model import BlendModel
from blendrag.store import KVEntry


class Context:
    """The KV of a prompt's first `tokens` tokens, one layer at a time.

    Attributes:
        stored: bool [tokens]; True where an entry stands in.
    """

    def __init__(self, model: BlendModel, tokens: int, entries: Sequence[tuple[Placement, KVEntry]]) -> None:
        self.model = model
        self.tokens = tokens
        self.entries = entries
        self.stored = torch.zeros(tokens, dtype=torch.bool, device=model.device)
        for placement, _ in entries:
            self.stored[placement.start : placement.end] = True
        self._places = self.stored.nonzero()[:, 0]
        self._earlier: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Stored K (rotated) and V of a layer, [tokens, kv heads, head size]; zero where nothing is stored."""
        attention = self.model.layers[index].attention
        shape = (self.tokens, attention.num_kv_heads, attention.head_size)
        k = torch.zeros(shape, dtype=self.model.dtype, device=self.model.device)
        v = torch.zeros_like(k)
        if self.entries:
            keys = torch.cat([self._fetch(entry.k, index, placement) for placement, entry in self.entries])
            k[self._places] = self.model.layers[index].rotation.rotate(keys, self._places)
            v[self._places] = torch.cat([self._fetch(entry.v, index, placement) for placement, entry in self.entries])
        return k, v

    def merged(self, index: int, part: Part, positions: torch.Tensor, k: torch.Tensor,
               v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer with the rows' fresh ones put in, earlier parts' rows included.

        Args:
            positions: int64 [rows], of the part's rows.
            k, v: the part's rows, [rows, kv heads, head size].
        """
        all_k, all_v = self.layer(index)
        if index in self._earlier:
            before, before_k, before_v = self._earlier[index]
            all_k[before], all_v[before] = before_k, before_v
            if not part.last:
                positions, k, v = torch.cat([before, positions]), torch.cat([before_k, k]), torch.cat([before_v, v])
        all_k[positions], all_v[positions] = k, v
        if part.last:
            self._earlier.pop(index, None)
        else:
            self._earlier[index] = (positions, k.clone(), v.clone())
        return all_k, all_v

    def _fetch(self, tensor: torch.Tensor, index: int, placement: Placement) -> torch.Tensor:
        piece = tensor[index, : placement.end - placement.start]
        return piece.to(self.model.device, self.model.dtype, non_blocking=True)
