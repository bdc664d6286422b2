"""Moves what is not recomputed along with what is, on a CUDA device: two Triton kernels around a matrix product.

The same as `torch_drift` does, where a layer takes some fifty launches, each longer than its work.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from blendrag.runtime.model.rotation import NoRotation, Rotation
from blendrag.runtime.passes.averages import Averages
from blendrag.runtime.passes.triton_rotation import pairs, table_of

_BLOCK_ROWS = 16


@triton.jit
def _changes_kernel(k_ptr, v_ptr, all_k_ptr, all_v_ptr, row_ptr, at_ptr, slot_ptr, cos_ptr, sin_ptr, out_ptr,
                    count, k_row, v_row, all_row, table_row, size: tl.constexpr, start: tl.constexpr,
                    half: tl.constexpr, padded_half: tl.constexpr, padded: tl.constexpr, neox: tl.constexpr,
                    block_rows: tl.constexpr):
    probes = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    head = tl.program_id(1)
    ok = probes < count
    row = tl.load(row_ptr + probes, mask=ok, other=0)
    at = tl.load(at_ptr + probes, mask=ok, other=0)
    slot = tl.load(slot_ptr + probes, mask=ok, other=0)
    element = out_ptr.dtype.element_ty
    dims = tl.arange(0, padded)
    all_ok = ok[:, None] & (dims < size)[None, :]
    out = (slot * tl.num_programs(1) + head)[:, None] * (2 * size)
    fresh_v = tl.load(v_ptr + row[:, None] * v_row + head * size + dims[None, :], mask=all_ok, other=0.0)
    stored_v = tl.load(all_v_ptr + at[:, None] * all_row + head * size + dims[None, :], mask=all_ok, other=0.0)
    change_v = fresh_v.to(tl.float32) - stored_v.to(tl.float32)
    tl.store(out_ptr + out + size + dims[None, :], change_v.to(element), mask=all_ok)
    fresh = k_ptr + row[:, None] * k_row + head * size
    stored = all_k_ptr + at[:, None] * all_row + head * size
    if half > 0:
        pair, first, second = pairs(start, half, padded_half, neox)
        pair_ok = ok[:, None] & (pair < half)[None, :]
        x = (tl.load(fresh + first[None, :], mask=pair_ok, other=0.0).to(tl.float32)
             - tl.load(stored + first[None, :], mask=pair_ok, other=0.0).to(tl.float32))
        y = (tl.load(fresh + second[None, :], mask=pair_ok, other=0.0).to(tl.float32)
             - tl.load(stored + second[None, :], mask=pair_ok, other=0.0).to(tl.float32))
        cos = tl.load(cos_ptr + at[:, None] * table_row + pair[None, :], mask=pair_ok, other=1.0)
        sin = tl.load(sin_ptr + at[:, None] * table_row + pair[None, :], mask=pair_ok, other=0.0)
        norm = cos * cos + sin * sin
        tl.store(out_ptr + out + first[None, :], ((x * cos + y * sin) / norm).to(element), mask=pair_ok)
        tl.store(out_ptr + out + second[None, :], ((y * cos - x * sin) / norm).to(element), mask=pair_ok)
    if 2 * half < size:
        rest_ok = all_ok & ((dims < start) | (dims >= start + 2 * half))[None, :]
        change = (tl.load(fresh + dims[None, :], mask=rest_ok, other=0.0).to(tl.float32)
                  - tl.load(stored + dims[None, :], mask=rest_ok, other=0.0).to(tl.float32))
        tl.store(out_ptr + out + dims[None, :], change.to(element), mask=rest_ok)


@triton.jit
def _move_kernel(moved_ptr, average_ptr, overall_ptr, all_k_ptr, all_v_ptr, at_ptr, slot_ptr, cos_ptr, sin_ptr,
                 count, all_row, table_row, size: tl.constexpr, start: tl.constexpr, half: tl.constexpr,
                 padded_half: tl.constexpr, padded: tl.constexpr, neox: tl.constexpr, block_rows: tl.constexpr):
    stale = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    head = tl.program_id(1)
    ok = stale < count
    at = tl.load(at_ptr + stale, mask=ok, other=0)
    slot = tl.load(slot_ptr + stale, mask=ok, other=0)
    share = tl.load(overall_ptr + slot, mask=ok, other=0.0).to(tl.float32)[:, None]
    element = all_k_ptr.dtype.element_ty
    dims = tl.arange(0, padded)
    all_ok = ok[:, None] & (dims < size)[None, :]
    moved = moved_ptr + (slot * tl.num_programs(1) + head)[:, None] * (2 * size)
    average = average_ptr + head * (2 * size)
    v = all_v_ptr + at[:, None] * all_row + head * size + dims[None, :]
    change_v = (tl.load(moved + size + dims[None, :], mask=all_ok, other=0.0).to(tl.float32)
                + share * tl.load(average + size + dims, mask=dims < size, other=0.0).to(tl.float32)[None, :])
    tl.store(v, (tl.load(v, mask=all_ok, other=0.0).to(tl.float32) + change_v).to(element), mask=all_ok)
    k = all_k_ptr + at[:, None] * all_row + head * size
    if half > 0:
        pair, first, second = pairs(start, half, padded_half, neox)
        pair_in = pair < half
        pair_ok = ok[:, None] & pair_in[None, :]
        x = (tl.load(moved + first[None, :], mask=pair_ok, other=0.0).to(tl.float32)
             + share * tl.load(average + first, mask=pair_in, other=0.0).to(tl.float32)[None, :])
        y = (tl.load(moved + second[None, :], mask=pair_ok, other=0.0).to(tl.float32)
             + share * tl.load(average + second, mask=pair_in, other=0.0).to(tl.float32)[None, :])
        cos = tl.load(cos_ptr + at[:, None] * table_row + pair[None, :], mask=pair_ok, other=0.0)
        sin = tl.load(sin_ptr + at[:, None] * table_row + pair[None, :], mask=pair_ok, other=0.0)
        old_x = tl.load(k + first[None, :], mask=pair_ok, other=0.0).to(tl.float32)
        old_y = tl.load(k + second[None, :], mask=pair_ok, other=0.0).to(tl.float32)
        tl.store(k + first[None, :], (old_x + x * cos - y * sin).to(element), mask=pair_ok)
        tl.store(k + second[None, :], (old_y + y * cos + x * sin).to(element), mask=pair_ok)
    if 2 * half < size:
        rest_in = ((dims < start) | (dims >= start + 2 * half)) & (dims < size)
        rest_ok = ok[:, None] & rest_in[None, :]
        change = (tl.load(moved + dims[None, :], mask=rest_ok, other=0.0).to(tl.float32)
                  + share * tl.load(average + dims, mask=rest_in, other=0.0).to(tl.float32)[None, :])
        old = tl.load(k + dims[None, :], mask=rest_ok, other=0.0).to(tl.float32)
        tl.store(k + dims[None, :], (old + change).to(element), mask=rest_ok)


class DriftKernels:
    """The averages of one prompt; see `blendrag.runtime.passes.drift`."""

    def __init__(self, averages: Averages) -> None:
        self._probes, self._at, self._stale = averages.probes, averages.probes_at, averages.stale
        self._local, self._overall = averages.local, averages.overall.contiguous()
        blocks, slots, probe_slots = self._local.shape
        self._probe_slots = averages.probe_slots[0] * probe_slots + averages.probe_slots[1]
        self._stale_slots = averages.stale_slots[0] * slots + averages.stale_slots[1]
        self._shares = self._local.new_zeros(1, blocks * probe_slots)
        self._shares[0, self._probe_slots] = 1 / len(self._probes)
        self._changes: torch.Tensor | None = None

    def apply(self, k: torch.Tensor, v: torch.Tensor, all_k: torch.Tensor, all_v: torch.Tensor,
              rotation: Rotation | NoRotation) -> None:
        """Moves the stale tokens of a layer, in place; the arguments are `Drift.apply`'s, of one size per layer."""
        heads, size = all_k.shape[1:]
        blocks, _, probe_slots = self._local.shape
        if self._changes is None:  # slots without a probe stay 0
            self._changes = self._local.new_zeros(blocks, probe_slots, heads * 2 * size)
        cos, sin, constants = table_of(rotation, all_k)
        _changes_kernel[(triton.cdiv(len(self._probes), _BLOCK_ROWS), heads)](
            k, v, all_k, all_v, self._probes, self._at, self._probe_slots, cos, sin, self._changes, len(self._probes),
            k.stride(0), v.stride(0), all_k.stride(0), cos.stride(0), *constants, _BLOCK_ROWS)
        average = self._shares @ self._changes.view(blocks * probe_slots, -1)
        moved = torch.bmm(self._local, self._changes)
        _move_kernel[(triton.cdiv(len(self._stale), _BLOCK_ROWS), heads)](
            moved, average, self._overall, all_k, all_v, self._stale, self._stale_slots, cos, sin, len(self._stale),
            all_k.stride(0), cos.stride(0), *constants, _BLOCK_ROWS)
