"""The attention of `blendrag.runtime.passes.attention` as one Triton kernel, for CUDA devices."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from blendrag.runtime.passes.rows import Rows
from blendrag.runtime.passes.sparsity import BLOCK

_PROGRAMS = 264  # two for each multiprocessor of a large GPU
_MOST_SPLITS = 8
_SPLIT_KEYS = 1024  # a split of fewer keys is not worth joining


@triton.jit
def _attend_kernel(q_ptr, k_ptr, v_ptr, out_ptr, position_ptr, valid_ptr, order_ptr, group_ptr, allowed_ptr,
                   list_ptr, count_ptr, best_ptr, total_ptr, num_rows, num_blocks, scale, soft_cap,
                   q_row, q_head, k_token, k_head, v_token, v_head, out_row, out_head,
                   group: tl.constexpr, size: tl.constexpr, padded: tl.constexpr, window: tl.constexpr,
                   has_valid: tl.constexpr, sparse: tl.constexpr, capped: tl.constexpr, precision: tl.constexpr,
                   block_rows: tl.constexpr, block_keys: tl.constexpr, block: tl.constexpr, splits: tl.constexpr):
    head = tl.program_id(1).to(tl.int64)
    row_block = tl.num_programs(0) - 1 - tl.program_id(0)  # those that see most are last: they start first
    rows = row_block * block_rows + tl.arange(0, block_rows)
    dims = tl.arange(0, padded)
    row_ok = rows < num_rows
    dim_ok = dims < size
    if sparse:
        rows = tl.load(order_ptr + rows, mask=row_ok, other=0)
    position = tl.load(position_ptr + rows, mask=row_ok, other=-1)
    end = tl.max(position) + 1
    begin = 0
    if window > 0:
        lowest = tl.min(tl.where(row_ok, position, end))
        begin = tl.maximum(0, lowest - window + 1) // block_keys * block_keys
    pieces = (end - begin + block_keys - 1) // block_keys
    if sparse:
        pieces = tl.load(count_ptr + row_block) * (block // block_keys)
        allowed_row = allowed_ptr + tl.load(group_ptr + rows, mask=row_ok, other=0) * num_blocks
    wide = rows.to(tl.int64)
    q = tl.load(q_ptr + wide[:, None] * q_row + head * q_head + dims[None, :],
                mask=row_ok[:, None] & dim_ok[None, :], other=0.0)
    best = tl.full([block_rows], -1e30, tl.float32)
    total = tl.zeros([block_rows], tl.float32)
    acc = tl.zeros([block_rows, padded], tl.float32)
    k_base = k_ptr + (head // group) * k_head
    v_base = v_ptr + (head // group) * v_head
    split = tl.program_id(2)
    for piece in range(pieces * split // splits, pieces * (split + 1) // splits):
        start = begin + piece * block_keys
        if sparse:
            key_block = tl.load(list_ptr + row_block * num_blocks + piece // (block // block_keys))
            start = key_block * block + piece % (block // block_keys) * block_keys
        keys = start + tl.arange(0, block_keys)
        key_ok = keys < end
        wide_keys = keys.to(tl.int64)
        k = tl.load(k_base + wide_keys[None, :] * k_token + dims[:, None],
                    mask=key_ok[None, :] & dim_ok[:, None], other=0.0)
        x = tl.dot(q, k, input_precision=precision) * scale
        if capped:
            x = soft_cap * (2.0 / (1.0 + tl.exp(-2.0 * x / soft_cap)) - 1.0)
        x = x * 1.4426950408889634
        seen = (keys[None, :] <= position[:, None]) & key_ok[None, :]
        if window > 0:
            seen = seen & (keys[None, :] > position[:, None] - window)
        if has_valid:
            # What is not valid is not initialised: not even nothing of its values may be added.
            key_ok = key_ok & (tl.load(valid_ptr + keys, mask=key_ok, other=0) != 0)
            seen = seen & key_ok[None, :]
        if sparse:
            allowed = tl.load(allowed_row + key_block, mask=row_ok, other=0) != 0
            seen = seen & (allowed | (key_block >= position // block - 1))[:, None]
        x = tl.where(seen, x, -1e30)
        new_best = tl.maximum(best, tl.max(x, 1))
        # A tile in which a row sees nothing must add nothing to it.
        p = tl.where(seen, tl.exp2(x - new_best[:, None]), 0.0)
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(v_base + wide_keys[:, None] * v_token + dims[None, :],
                    mask=key_ok[:, None] & dim_ok[None, :], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=precision)
        best = new_best
    ok = row_ok[:, None] & dim_ok[None, :]
    if splits == 1:
        out = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out_ptr + wide[:, None] * out_row + head * out_head + dims[None, :],
                 out.to(out_ptr.dtype.element_ty), mask=ok)
    else:
        at = (split * num_rows + wide) * tl.num_programs(1) + head
        tl.store(out_ptr + at[:, None] * size + dims[None, :], acc, mask=ok)
        tl.store(best_ptr + at, best, mask=row_ok)
        tl.store(total_ptr + at, total, mask=row_ok)


@triton.jit
def _join_kernel(part_ptr, best_ptr, total_ptr, out_ptr, num_parts, out_row, out_head,
                 size: tl.constexpr, padded: tl.constexpr, splits: tl.constexpr, padded_splits: tl.constexpr):
    """Puts together what each split of the keys made of a row and head."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, padded_splits)
    dims = tl.arange(0, padded)
    ok = split < splits
    at = split * num_parts + row * tl.num_programs(1) + head
    best = tl.load(best_ptr + at, mask=ok, other=-1e30)
    weight = tl.exp2(best - tl.max(best))
    total = tl.sum(tl.load(total_ptr + at, mask=ok, other=0.0) * weight)
    part = tl.load(part_ptr + at[:, None] * size + dims[None, :], mask=ok[:, None] & (dims < size)[None, :], other=0.0)
    out = tl.sum(part * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + row * out_row + head * out_head + dims, out.to(out_ptr.dtype.element_ty), mask=dims < size)


def attend_triton(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, *, scale: float, window: int,
                  soft_cap: float) -> torch.Tensor:
    """See `blendrag.runtime.passes.attention.attend`; the last dimension of q, k and v must be contiguous."""
    count, heads, size = q.shape
    out = torch.empty((count, heads, size), dtype=q.dtype, device=q.device)
    wide = q.element_size() > 2
    block_rows, block_keys = (64, 32) if wide else (128, 64)  # what fits into Hopper's shared memory
    unused = rows.positions
    order = groups = allowed = key_blocks = key_counts = unused
    if rows.sparsity is not None:
        order, groups, key_blocks, key_counts = rows.blocks(window, block_rows)
        allowed = rows.sparsity.allowed
    row_blocks, padded = triton.cdiv(count, block_rows), max(16, triton.next_power_of_2(size))
    # Few rows over many keys: the keys are split, so that all of the GPU has something to do (as flash decoding does).
    splits = max(1, min(_MOST_SPLITS, _PROGRAMS // (row_blocks * heads), rows.keys // _SPLIT_KEYS))
    part, best, total = out, unused, unused
    if splits > 1:
        part = torch.empty((splits, count, heads, size), dtype=torch.float32, device=q.device)
        best, total = torch.empty((2, splits, count, heads), dtype=torch.float32, device=q.device)
    _attend_kernel[(row_blocks, heads, splits)](
        q, k, v, part, rows.positions, unused if rows.valid is None else rows.valid, order, groups, allowed,
        key_blocks, key_counts, best, total, count, key_blocks.shape[-1], scale, soft_cap,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), out.stride(0), out.stride(1),
        heads // k.shape[1], size, padded, window, rows.valid is not None, rows.sparsity is not None, soft_cap > 0,
        "ieee" if wide else "tf32", block_rows, block_keys, BLOCK, splits, num_warps=8, num_stages=3)
    if splits > 1:
        _join_kernel[(count, heads)](part, best, total, out, count * heads, out.stride(0), out.stride(1), size, padded,
                                     splits, triton.next_power_of_2(splits))
    return out
