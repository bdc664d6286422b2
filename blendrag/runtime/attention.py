"""Attention of some rows of a prompt over all of it, with the exact mask.

A row at position p sees the keys at positions `k <= p` (and, with a sliding window w, `k > p - w`).
Flash kernels' `causal=True` aligns the last row with the last key instead, which lets scattered rows
see the future.

With `Sparsity`, rows are taken in an order in which those that see alike are neighbours, so that the keys that none of
a tile's rows sees can be left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

from blendrag.runtime.sparsity import BLOCK, Sparsity

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
            return [slice(at, min(at + _TILE, total)) for at in range(0, total, _TILE)]
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


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, *, scale: float, window: int = 0,
           soft_cap: float = 0.0) -> torch.Tensor:
    """softmax(q k^T scale) v over the keys each row sees.

    Args:
        q: [rows, heads, head size].
        k, v: [keys, kv heads, head size], in the order of positions.
        window: sliding window in tokens, the row's own included; 0 for none.
        soft_cap: logits x become cap * tanh(x / cap); 0 for none.

    Returns:
        [rows, heads, head size] in q's dtype.
    """
    if q.is_cuda:
        from blendrag.runtime.triton_attention import attend_triton

        return attend_triton(q, k, v, rows, scale=scale, window=window, soft_cap=soft_cap)
    out = torch.empty_like(q)
    for at, seen, mask in rows.masks(window, q.dtype):
        if soft_cap:
            out[at] = weighted(scores(q[at], k[seen], mask == 0, scale=scale, soft_cap=soft_cap), v[seen]).to(q.dtype)
        else:
            tile = scaled_dot_product_attention(
                q[at].transpose(0, 1)[None], k[seen].transpose(0, 1)[None], v[seen].transpose(0, 1)[None],
                attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
            out[at] = tile[0].transpose(0, 1)
    return out


def weights(q: torch.Tensor, k: torch.Tensor, rows: Rows, *, scale: float, window: int = 0,
            soft_cap: float = 0.0) -> torch.Tensor:
    """How much each row attends to each key, summed over heads: [rows, keys], float32.  Arguments as for `attend`."""
    if q.is_cuda:
        from blendrag.runtime.triton_scores import weights_triton

        return weights_triton(q, k, rows, scale=scale, window=window, soft_cap=soft_cap)
    seen = rows.visible(rows.positions, 0, rows.keys, window)
    return scores(q, k, seen, scale=scale, soft_cap=soft_cap).sum(0)


def scores(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor, *, scale: float,
           soft_cap: float = 0.0) -> torch.Tensor:
    """Softmax weights [heads, rows, keys], float32.  Mask: bool [rows, keys], True = seen."""
    heads, kv_heads = q.shape[1], k.shape[1]
    grouped = q.float().reshape(q.shape[0], kv_heads, heads // kv_heads, -1)
    logits = torch.einsum("qgmd,kgd->gmqk", grouped, k.float()).flatten(0, 1) * scale
    if soft_cap:
        logits = torch.tanh(logits / soft_cap) * soft_cap
    return logits.masked_fill(~mask, float("-inf")).softmax(-1)


def weighted(weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """What `scores`' weights make of v [keys, kv heads, head size]: [rows, heads, head size], float32."""
    grouped = weights.view(v.shape[1], -1, *weights.shape[1:])
    return torch.einsum("gmqk,kgd->qgmd", grouped, v.float()).flatten(1, 2)
