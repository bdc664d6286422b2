"""Attention of some rows of a prompt over all of it, with the exact mask.

A row at position p sees the keys at positions `k <= p` (and, with a sliding window w, `k > p - w`).
Flash kernels' `causal=True` aligns the last row with the last key instead, which lets scattered rows
see the future.

With `Sparsity`, rows are taken in an order in which those that see alike are neighbours, so that the keys that none of
a tile's rows sees can be left out.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from blendrag.runtime.passes.rows import Rows


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
        from blendrag.runtime.passes.triton_attention import attend_triton

        return attend_triton(q, k, v, rows, scale=scale, window=window, soft_cap=soft_cap)
    out = torch.empty_like(q)
    for at, seen, mask in rows.masks(window, q.dtype):
        if soft_cap:
            out[at] = weighted(scores(q[at], k[seen], mask == 0, scale=scale, soft_cap=soft_cap), v[seen])
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
        from blendrag.runtime.passes.triton_scores import weights_triton

        return weights_triton(q, k, rows, scale=scale, window=window, soft_cap=soft_cap)
    seen = rows.visible(rows.positions, 0, rows.keys, window)
    return scores(q, k, seen, scale=scale, soft_cap=soft_cap).sum(0)


def attend_and_weigh(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, *, scale: float, window: int = 0,
                     soft_cap: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """What `attend` and `weights` return, of few rows on the CPU: with the weights at hand, the rest is one product."""
    seen = rows.visible(rows.positions, 0, rows.keys, window)
    found = scores(q, k, seen, scale=scale, soft_cap=soft_cap)
    return weighted(found, v), found.sum(0)


def scores(q: torch.Tensor, k: torch.Tensor, seen: torch.Tensor, *, scale: float,
           soft_cap: float = 0.0) -> torch.Tensor:
    """Softmax weights [heads, rows, keys], float32.  `seen`: bool [rows, keys], which keys a row sees."""
    grouped = (q.float() * scale).reshape(len(q), k.shape[1], -1, q.shape[2]).permute(1, 2, 0, 3).flatten(1, 2)
    logits = torch.bmm(grouped, k.permute(1, 2, 0).float()).view(-1, *seen.shape)
    if soft_cap:
        logits = torch.tanh(logits / soft_cap) * soft_cap
    # Adding is several times quicker than filling with a mask that is the same for all heads.
    logits += torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, float("-inf"))
    return logits.softmax(-1)


def weighted(weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """What `scores`' weights make of v [keys, kv heads, head size]: [rows, heads, head size], in v's dtype."""
    grouped = weights.view(v.shape[1], -1, weights.shape[-1]).to(v.dtype)
    out = torch.bmm(grouped, v.transpose(0, 1))
    return out.view(*weights.shape[:2], -1).transpose(0, 1)
