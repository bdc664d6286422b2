"""Moves stored KV of one layer to the GPU, rotates it and puts it in its place, in one Triton kernel.

The kernel reads page-locked host memory directly (unified addressing), so that nothing is staged and
one launch serves all chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from blendrag.runtime.messages import Placement
from blendrag.runtime.model.rotation import NoRotation, Rotation
from blendrag.runtime.passes.triton_rotation import pairs, table_of
from blendrag.store import KVEntry

_BLOCK_TOKENS = 16


@triton.jit
def _gather_kernel(k_address_ptr, v_address_ptr, step_ptr, place_ptr, cos_ptr, sin_ptr, k_out_ptr, v_out_ptr,
                   num_tokens, layer, out_token, table_row,
                   size: tl.constexpr, start: tl.constexpr, half: tl.constexpr, padded_half: tl.constexpr,
                   padded: tl.constexpr, neox: tl.constexpr, block_tokens: tl.constexpr):
    for block in range(tl.program_id(0), (num_tokens + block_tokens - 1) // block_tokens, tl.num_programs(0)):
        _gather_block(k_address_ptr, v_address_ptr, step_ptr, place_ptr, cos_ptr, sin_ptr, k_out_ptr, v_out_ptr,
                      num_tokens, layer, out_token, table_row, block, tl.program_id(1),
                      size, start, half, padded_half, padded, neox, block_tokens)


@triton.jit
def _gather_block(k_address_ptr, v_address_ptr, step_ptr, place_ptr, cos_ptr, sin_ptr, k_out_ptr, v_out_ptr,
                  num_tokens, layer, out_token, table_row, block, head,
                  size: tl.constexpr, start: tl.constexpr, half: tl.constexpr, padded_half: tl.constexpr,
                  padded: tl.constexpr, neox: tl.constexpr, block_tokens: tl.constexpr):
    tokens = block * block_tokens + tl.arange(0, block_tokens)
    ok = tokens < num_tokens
    place = tl.load(place_ptr + tokens, mask=ok, other=0)
    shift = tl.load(step_ptr + tokens, mask=ok, other=0) * layer
    element = k_out_ptr.dtype.element_ty
    k_in = (tl.load(k_address_ptr + tokens, mask=ok, other=0) + shift).to(tl.pointer_type(element))
    v_in = (tl.load(v_address_ptr + tokens, mask=ok, other=0) + shift).to(tl.pointer_type(element))
    dims = tl.arange(0, padded)
    all_ok = ok[:, None] & (dims < size)[None, :]
    out = place[:, None] * out_token + head * size
    v = tl.load(v_in[:, None] + head * size + dims[None, :], mask=all_ok, other=0.0)
    tl.store(v_out_ptr + out + dims[None, :], v, mask=all_ok)
    if half > 0:
        pair, first, second = pairs(start, half, padded_half, neox)
        pair_ok = ok[:, None] & (pair < half)[None, :]
        x = tl.load(k_in[:, None] + head * size + first[None, :], mask=pair_ok, other=0.0).to(tl.float32)
        y = tl.load(k_in[:, None] + head * size + second[None, :], mask=pair_ok, other=0.0).to(tl.float32)
        row = place[:, None] * table_row + pair[None, :]
        cos = tl.load(cos_ptr + row, mask=pair_ok, other=0.0)
        sin = tl.load(sin_ptr + row, mask=pair_ok, other=0.0)
        tl.store(k_out_ptr + out + first[None, :], (x * cos - y * sin).to(element), mask=pair_ok)
        tl.store(k_out_ptr + out + second[None, :], (y * cos + x * sin).to(element), mask=pair_ok)
    if 2 * half < size:
        rest_ok = all_ok & ((dims < start) | (dims >= start + 2 * half))[None, :]
        k = tl.load(k_in[:, None] + head * size + dims[None, :], mask=rest_ok, other=0.0)
        tl.store(k_out_ptr + out + dims[None, :], k, mask=rest_ok)


class Gather:
    """The stored KV of one prompt, layer by layer.

    Args:
        entries: in page-locked host memory or on the device, contiguous, of the model's dtype.
    """

    def __init__(self, entries: Sequence[tuple[Placement, KVEntry]], device: torch.device) -> None:
        self._entries = entries  # keeps the memory alive
        k_addresses, v_addresses, steps, places = [], [], [], []
        for placement, entry in entries:
            count = placement.end - placement.start
            row_bytes = entry.k[0, 0].nbytes
            rows = torch.arange(placement.offset, placement.offset + count) * row_bytes
            k_addresses.append(rows + entry.k.data_ptr())
            v_addresses.append(rows + entry.v.data_ptr())
            steps.append(torch.full((count,), entry.k[0].nbytes))
            places.append(torch.arange(placement.start, placement.end))
        table = torch.stack([torch.cat(k_addresses), torch.cat(v_addresses), torch.cat(steps), torch.cat(places)])
        self._table = table.to(device)

    @staticmethod
    def takes(entries: Sequence[tuple[Placement, KVEntry]], dtype: torch.dtype) -> bool:
        """Whether the kernel can read these entries."""
        return bool(entries) and all(
            t.dtype == dtype and t.is_contiguous() and (t.is_cuda or t.is_pinned())
            for _, entry in entries for t in (entry.k, entry.v))

    def layer(self, index: int, rotation: Rotation | NoRotation, k: torch.Tensor, v: torch.Tensor,
              programs: int | None = None) -> None:
        """Fills the stored places of k and v, [tokens, kv heads, head size] and contiguous, of layer `index`.

        Args:
            programs: how many share a head's tokens; None for as many as there are blocks of tokens.
        """
        k_addresses, v_addresses, steps, places = self._table
        cos, sin, constants = table_of(rotation, k)
        blocks = triton.cdiv(len(places), _BLOCK_TOKENS)
        _gather_kernel[(min(programs or blocks, blocks), k.shape[1])](
            k_addresses, v_addresses, steps, places, cos, sin, k, v, len(places), index, k.stride(0), cos.stride(0),
            *constants, _BLOCK_TOKENS)
