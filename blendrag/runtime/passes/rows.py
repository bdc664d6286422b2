"""Which rows of a prompt attend, and what they may see.

A row at position p sees the keys at positions `k <= p` (and, with a sliding window w, `k > p - w`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from blendrag.runtime.passes.sparsity import BLOCK, Sparsity

_TILE = 256  # smaller tiles skip more keys, larger ones keep the cores busier
_SPARSE_TILE = 64  # where there is more to skip

Index = slice | torch.Tensor
Tile = tuple[Index, Index, torch.Tensor]


@dataclass
class Rows:
    """Which rows attend, and what they may see.

    Attributes:
        positions: int64 [rows], ascending, on the model's device.
        keys: number of keys; the key at index i has position i.
        valid: bool [keys]; False where there is no KV. None: all valid.
        sparsity: what else they do not see, of a prompt with as many tokens as there are keys. None: nothing.
    """

    positions: torch.Tensor
    keys: int
    valid: torch.Tensor | None = None
    sparsity: Sparsity | None = None
    _masks: dict[tuple[int, torch.dtype], list[Tile]] = field(default_factory=dict)
    _blocks: dict[tuple[int, int], tuple[torch.Tensor, ...]] = field(default_factory=dict)

    def masks(self, window: int, dtype: torch.dtype) -> list[Tile]:
        """`(rows, keys, mask)` tiles that skip what no row of the tile sees; computed once for all layers.

        A mask is added to the logits: 0 where a row sees a key, minus infinity where it does not.
        """
        if (window, dtype) not in self._masks:
            self._masks[window, dtype] = [self._tile(rows, window, dtype) for rows in self._cut()]
        return self._masks[window, dtype]

    def blocks(self, window: int, height: int) -> tuple[torch.Tensor, ...]:
        """What the Triton kernel must know of `sparsity`; computed once for all layers.

        Returns:
            order: int64 [rows], in which the rows are cut into row blocks of `height`.
            groups: int64 [rows], of each row.
            blocks, counts: see `Sparsity.key_blocks`.
        """
        assert self.sparsity is not None
        if (window, height) not in self._blocks:
            order, _ = self.sparsity.order(self.positions)
            blocks, counts = self.sparsity.key_blocks(self.positions[order], height, window)
            self._blocks[window, height] = order, self.sparsity.groups[self.positions], blocks, counts
        return self._blocks[window, height]

    def _cut(self) -> list[Index]:
        total = len(self.positions)
        if self.sparsity is None:
            tile = -(-total // max(1, round(total / _TILE)))  # none much smaller than the others
            return [slice(at, min(at + tile, total)) for at in range(0, total, tile or 1)]
        order, sparse = self.sparsity.order(self.positions)
        tiles = *torch.split(order[:sparse], _SPARSE_TILE), *torch.split(order[sparse:], _TILE)
        return [tile for tile in tiles if len(tile)]

    def _tile(self, rows: Index, window: int, dtype: torch.dtype) -> Tile:
        positions = self.positions[rows]
        first = max(0, int(positions.min()) - window + 1) if window else 0
        last = min(self.keys, int(positions.max()) + 1)
        seen = self.visible(positions, first, last, window)
        keys: Index = slice(first, last)
        if self.sparsity is not None and not (some := seen.any(0)).all():
            seen, keys = seen[:, some], first + some.nonzero()[:, 0]
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
        return rows, keys, mask

    def visible(self, positions: torch.Tensor, first: int, last: int, window: int) -> torch.Tensor:
        """bool [len(positions), last - first]: which of the keys `first..last` each position sees."""
        keys = torch.arange(first, last, device=positions.device)
        seen = keys[None] <= positions[:, None]
        if window:
            seen &= keys[None] > positions[:, None] - window
        if self.valid is not None:
            seen &= self.valid[None, first:last]
        if self.sparsity is not None:
            blocks = torch.arange(-(-last // BLOCK), device=positions.device)
            seen &= self.sparsity.permits(positions, blocks)[:, keys // BLOCK]
        return seen
