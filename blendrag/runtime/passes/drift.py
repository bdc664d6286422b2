"""Carries the change of recomputed tokens over to their neighbours, which keep stored KV.

In a new context a chunk's keys and values move away from the stored ones, and tokens that stand close together move
alike.  Where a pass has recomputed a token, the change is known; a token that it has not recomputed takes the weighted
average of the changes around it.  That costs no rows.

AgentKVShift (arXiv 2607.21604) adds the mean change of a few probe tokens to a chunk; here the average is local, and
the probes are the tokens that the policy chose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from blendrag.policies import Layout
from blendrag.runtime.model.rotation import NoRotation, Rotation
from blendrag.runtime.passes.averages import Neighbours
from blendrag.runtime.passes.torch_drift import DriftProducts

if TYPE_CHECKING:
    from blendrag.runtime.passes.triton_drift import DriftKernels


class Drift:
    """The changes in one prompt; the arguments are those of `Neighbours`."""

    def __init__(self, layout: Layout, rows: torch.Tensor, reach: float) -> None:
        self._neighbours = Neighbours(layout, rows, reach)
        self._movers: dict[int, DriftProducts | DriftKernels | None] = {}

    def apply(self, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor, all_k: torch.Tensor,
              all_v: torch.Tensor, rotation: Rotation | NoRotation) -> None:
        """Moves the stale tokens of a layer, in place.

        Args:
            positions: int64 [rows], of the tokens computed so far.
            k, v: theirs, [rows, kv heads, head size], keys rotated.
            all_k, all_v: stored, [tokens, kv heads, head size], keys rotated.
        """
        if len(positions) not in self._movers:  # once for all layers; a lane in several parts knows more with each
            self._movers[len(positions)] = self._mover(positions, all_k)
        mover = self._movers[len(positions)]
        if mover is not None:
            mover.apply(k, v, all_k, all_v, rotation)

    def _mover(self, positions: torch.Tensor, keys: torch.Tensor) -> DriftProducts | DriftKernels | None:
        averages = self._neighbours.averages(positions, keys.dtype)
        if averages is None:
            return None
        if keys.is_cuda:
            from blendrag.runtime.passes.triton_drift import DriftKernels

            return DriftKernels(averages)
        return DriftProducts(averages)
