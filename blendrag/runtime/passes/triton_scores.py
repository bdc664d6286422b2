"""How much rows attend to keys as two Triton kernels, without a tensor of [heads, rows, keys]."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from blendrag.runtime.passes.rows import Rows


@triton.jit
def _logits(q, k, keys, end, position, valid_ptr, scale, soft_cap, window: tl.constexpr, has_valid: tl.constexpr,
            capped: tl.constexpr, precision: tl.constexpr):
    x = tl.dot(q, k, input_precision=precision) * scale
    if capped:
        x = soft_cap * (2.0 / (1.0 + tl.exp(-2.0 * x / soft_cap)) - 1.0)
    seen = (keys[None, :] <= position[:, None]) & (keys < end)[None, :]
    if window > 0:
        seen = seen & (keys[None, :] > position[:, None] - window)
    if has_valid:
        seen = seen & (tl.load(valid_ptr + keys, mask=keys < end, other=0)[None, :] != 0)
    return tl.where(seen, x * 1.4426950408889634, -1e30), seen


@triton.jit
def _total_kernel(q_ptr, k_ptr, position_ptr, valid_ptr, log_ptr, num_rows, scale, soft_cap,
                  q_row, q_head, k_token, k_head,
                  group: tl.constexpr, size: tl.constexpr, padded: tl.constexpr, window: tl.constexpr,
                  has_valid: tl.constexpr, capped: tl.constexpr, precision: tl.constexpr,
                  block_rows: tl.constexpr, block_keys: tl.constexpr):
    """The logarithm (base 2) of each row's sum of exponentials, [heads, rows]."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    dims = tl.arange(0, padded)
    row_ok = rows < num_rows
    position = tl.load(position_ptr + rows, mask=row_ok, other=-1)
    end = tl.max(position) + 1
    begin = 0
    if window > 0:
        begin = tl.maximum(0, tl.min(tl.where(row_ok, position, end)) - window + 1) // block_keys * block_keys
    q = tl.load(q_ptr + rows.to(tl.int64)[:, None] * q_row + head * q_head + dims[None, :],
                mask=row_ok[:, None] & (dims < size)[None, :], other=0.0)
    best = tl.full([block_rows], -1e30, tl.float32)
    total = tl.zeros([block_rows], tl.float32)
    for start in range(begin, end, block_keys):
        keys = start + tl.arange(0, block_keys)
        k = tl.load(k_ptr + (head // group) * k_head + keys.to(tl.int64)[None, :] * k_token + dims[:, None],
                    mask=(keys < end)[None, :] & (dims < size)[:, None], other=0.0)
        x, seen = _logits(q, k, keys, end, position, valid_ptr, scale, soft_cap, window, has_valid, capped, precision)
        new_best = tl.maximum(best, tl.max(x, 1))
        total = total * tl.exp2(best - new_best) + tl.sum(tl.where(seen, tl.exp2(x - new_best[:, None]), 0.0), 1)
        best = new_best
    tl.store(log_ptr + head * num_rows + rows, best + tl.log2(tl.where(total > 0, total, 1.0)), mask=row_ok)


@triton.jit
def _weights_kernel(q_ptr, k_ptr, position_ptr, valid_ptr, log_ptr, out_ptr, num_rows, num_keys, scale, soft_cap,
                    q_row, q_head, k_token, k_head, heads,
                    group: tl.constexpr, size: tl.constexpr, padded: tl.constexpr, window: tl.constexpr,
                    has_valid: tl.constexpr, capped: tl.constexpr, precision: tl.constexpr,
                    block_rows: tl.constexpr, block_keys: tl.constexpr):
    rows = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    keys = tl.program_id(0) * block_keys + tl.arange(0, block_keys)
    dims = tl.arange(0, padded)
    row_ok = rows < num_rows
    key_ok = keys < num_keys
    position = tl.load(position_ptr + rows, mask=row_ok, other=-1)
    acc = tl.zeros([block_rows, block_keys], tl.float32)
    for head in range(heads):
        q = tl.load(q_ptr + rows.to(tl.int64)[:, None] * q_row + head * q_head + dims[None, :],
                    mask=row_ok[:, None] & (dims < size)[None, :], other=0.0)
        k = tl.load(k_ptr + (head // group) * k_head + keys.to(tl.int64)[None, :] * k_token + dims[:, None],
                    mask=key_ok[None, :] & (dims < size)[:, None], other=0.0)
        x, seen = _logits(q, k, keys, num_keys, position, valid_ptr, scale, soft_cap, window, has_valid, capped,
                          precision)
        log = tl.load(log_ptr + head * num_rows + rows, mask=row_ok, other=0.0)
        acc += tl.where(seen, tl.exp2(x - log[:, None]), 0.0)
    tl.store(out_ptr + rows.to(tl.int64)[:, None] * num_keys + keys[None, :], acc,
             mask=row_ok[:, None] & key_ok[None, :])


def weights_triton(q: torch.Tensor, k: torch.Tensor, rows: Rows, *, scale: float, window: int,
                   soft_cap: float) -> torch.Tensor:
    """Softmax weights of q [rows, heads, head size] over k, summed over heads: [rows, keys], float32."""
    count, heads, size = q.shape
    log = torch.empty((heads, count), dtype=torch.float32, device=q.device)
    out = torch.empty((count, rows.keys), dtype=torch.float32, device=q.device)
    valid = rows.positions if rows.valid is None else rows.valid
    block_rows, block_keys = 32, 64
    shape = (heads // k.shape[1], size, max(16, triton.next_power_of_2(size)), window, rows.valid is not None,
             soft_cap > 0, "ieee" if q.element_size() > 2 else "tf32", block_rows, block_keys)
    strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1))
    _total_kernel[(triton.cdiv(count, block_rows), heads)](
        q, k, rows.positions, valid, log, count, scale, soft_cap, *strides, *shape)
    _weights_kernel[(triton.cdiv(rows.keys, block_keys), triton.cdiv(count, block_rows))](
        q, k, rows.positions, valid, log, out, count, rows.keys, scale, soft_cap, *strides, heads, *shape)
    return out
