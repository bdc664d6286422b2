"""What the Triton kernels that turn keys share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from blendrag.runtime.model.rotation import NoRotation, Rotation


@triton.jit
def pairs(start: tl.constexpr, half: tl.constexpr, padded_half: tl.constexpr, neox: tl.constexpr):
    """The rotated pairs: their numbers, which are columns of the table, and each one's two dimensions of a key."""
    pair = tl.arange(0, padded_half)
    if neox:
        first = start + pair
        second = start + pair + half
    else:
        first = start + 2 * pair
        second = start + 2 * pair + 1
    return pair, first, second


def table_of(rotation: Rotation | NoRotation, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Cosines and sines, and the kernels' constants: size, start, half, padded_half, padded, neox.

    Args:
        keys: [..., head size]; stands in for a table where there is none (half is 0).
    """
    size = keys.shape[-1]
    if isinstance(rotation, NoRotation):
        return keys, keys, (size, 0, 0, 1, triton.next_power_of_2(size), True)
    half = rotation.cos.shape[1]
    padded_half, padded = triton.next_power_of_2(half), triton.next_power_of_2(size)
    return rotation.cos, rotation.sin, (size, rotation.start, half, padded_half, padded, rotation.neox)
