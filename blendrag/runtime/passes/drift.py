"""Carries the change of recomputed tokens over to their neighbours, which keep stored KV.

In a new context a chunk's keys and values move away from the stored ones, and tokens that stand close together move
alike.  Where a pass has recomputed a token, the change is known; a token that it has not recomputed takes the weighted
average of the changes around it.  That costs no rows.

AgentKVShift (arXiv 2607.21604) adds the mean change of a few probe tokens to a chunk; here the average is local, and
the probes are the tokens that the policy chose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from blendrag.policies import Layout
from blendrag.runtime.model.rotation import NoRotation, Rotation

if TYPE_CHECKING:
    from blendrag.runtime.passes.triton_drift import DriftKernels

_BLOCK = 512
"""Tokens of a chunk that are looked at together; a recomputed one counts within its block."""

_SLOTS = 8
"""Slots of a block come in multiples of this: of other widths cuBLAS takes a kernel that is four times slower."""

_OVERALL = 0.5
"""Weight of the average over all chunks, in recomputed neighbours that stand right beside a token."""


@dataclass(frozen=True)
class _Weights:
    """Averages as one matrix product a block.

    Attributes:
        probes: int64 [probes], places of the recomputed tokens among the rows of the pass.
        probe_at: `(block, slot)` of each, int64 [probes] both.
        stale: int64 [stale], positions of the tokens that take an average.
        stale_at: `(block, slot)` of each, int64 [stale] both.
        local: [blocks, stale slots, probe slots], weights of the probes.
        overall: [blocks, stale slots, 1], weight of the average over all probes; the weights of a token add up to 1.
        shares: `overall` of each stale token, [stale, 1]; on the CPU.
        pieces: for each block that has both, which of `stale` and which of `probes` are in it, and their part of
            `local`; on the CPU, where products of just these sizes are quicker than one of all blocks.
    """

    probes: torch.Tensor
    probe_at: tuple[torch.Tensor, torch.Tensor]
    stale: torch.Tensor
    stale_at: tuple[torch.Tensor, torch.Tensor]
    local: torch.Tensor
    overall: torch.Tensor
    shares: torch.Tensor | None = None
    pieces: Sequence[tuple[slice, slice, torch.Tensor]] = ()


class Drift:
    """The changes in one prompt.

    Args:
        layout: where stored KV stands that is approximate.
        rows: bool [tokens], the tokens that the pass computes.
        reach: distance in tokens at which a probe's weight has fallen to 1/e.
    """

    def __init__(self, layout: Layout, rows: torch.Tensor, reach: float) -> None:
        self._reach = reach
        self._stale = layout.reused & ~rows
        self._block = torch.full_like(layout.reused, -1, dtype=torch.int64)
        count = 0
        for start, end in layout.chunks:
            for at in range(start, end, _BLOCK):
                self._block[at : min(at + _BLOCK, end)] = count
                count += 1
        self._block[~layout.reused] = -1
        self._blocks = count
        self._weights: dict[int, _Weights | None] = {}
        self._kernels: dict[int, DriftKernels] = {}
        self._angles: dict[tuple[int, int, bool], tuple[torch.Tensor, torch.Tensor]] = {}

    def apply(self, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor, all_k: torch.Tensor,
              all_v: torch.Tensor, rotation: Rotation | NoRotation) -> None:
        """Moves the stale tokens of a layer, in place.

        Args:
            positions: int64 [rows], of the tokens computed so far.
            k, v: theirs, [rows, kv heads, head size], keys rotated.
            all_k, all_v: stored, [tokens, kv heads, head size], keys rotated.
        """
        weights = self._of(positions, all_k.dtype)
        if weights is None:
            return
        if all_k.is_cuda:
            self._kernels_of(positions, weights).apply(k, v, all_k, all_v, rotation)
            return
        at = positions[weights.probes]
        # Changes are compared without rotation: the same change looks different at every position.
        change_k = _turned(rotation, k[weights.probes] - all_k[at], self._angle(rotation, at, back=True))
        change = torch.cat([change_k, v[weights.probes] - all_v[at]], -1)
        flat = change.flatten(1)
        assert weights.shares is not None
        moved = weights.shares * flat.float().mean(0).to(flat.dtype)
        for stale, probes, local in weights.pieces:
            moved[stale].addmm_(local, flat[probes])
        moved_k, moved_v = torch.split(moved.view(-1, *change.shape[1:]), k.shape[-1], -1)
        moved_k = _turned(rotation, moved_k, self._angle(rotation, weights.stale, back=False))
        for stored, by in ((all_k, moved_k), (all_v, moved_v)):  # index_add_ takes four times as long
            stored.index_copy_(0, weights.stale, stored[weights.stale] + by)

    def _kernels_of(self, positions: torch.Tensor, weights: _Weights) -> DriftKernels:
        if len(positions) not in self._kernels:
            from blendrag.runtime.passes.triton_drift import DriftKernels

            self._kernels[len(positions)] = DriftKernels(
                weights.probes, positions[weights.probes], weights.probe_at, weights.stale, weights.stale_at,
                weights.local, weights.overall)
        return self._kernels[len(positions)]

    def _of(self, positions: torch.Tensor, dtype: torch.dtype) -> _Weights | None:
        """Computed once for all layers; a lane in several parts knows more rows with each."""
        if len(positions) not in self._weights:
            self._weights[len(positions)] = self._weigh(positions, dtype)
        return self._weights[len(positions)]

    def _weigh(self, positions: torch.Tensor, dtype: torch.dtype) -> _Weights | None:
        stale = self._stale.nonzero()[:, 0]
        probes = (self._block[positions] >= 0).nonzero()[:, 0]
        if not len(stale) or not len(probes):
            return None
        at = positions[probes]
        probe_at, probe_places = self._slots(at)
        stale_at, stale_places = self._slots(stale)
        distance = (stale_places[:, :, None] - probe_places[:, None, :]).abs_()
        local = distance.div_(-self._reach).exp_()  # 0 where either is a filler: infinitely far away
        local.nan_to_num_(0.0)
        total = local.sum(2, keepdim=True) + _OVERALL
        local, overall = (local / total).to(dtype), (_OVERALL / total).to(dtype)
        if local.is_cuda:
            return _Weights(probes, probe_at, stale, stale_at, local, overall)
        pieces = []
        for block, (some_stale, some_probes) in enumerate(zip(self._cut(stale_at), self._cut(probe_at), strict=True)):
            rows, columns = some_stale.stop - some_stale.start, some_probes.stop - some_probes.start
            if rows and columns:
                pieces.append((some_stale, some_probes, local[block, :rows, :columns]))
        return _Weights(probes, probe_at, stale, stale_at, local, overall, overall[stale_at], pieces)

    def _cut(self, at: tuple[torch.Tensor, torch.Tensor]) -> list[slice]:
        """Which of some tokens, in order of their positions, are in each block."""
        ends = torch.bincount(at[0], minlength=self._blocks).cumsum(0).tolist()
        return [slice(start, end) for start, end in pairwise([0, *ends])]

    def _slots(self, at: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        """`(block, slot)` of each position, and float32 [blocks, slots] with the position in each slot."""
        blocks = self._block[at]
        counts = torch.bincount(blocks, minlength=self._blocks)
        slots = torch.arange(len(at), device=at.device) - (counts.cumsum(0) - counts)[blocks]
        width = -(-int(counts.max()) // _SLOTS) * _SLOTS
        places = torch.full((self._blocks, width), torch.inf, device=at.device)
        places[blocks, slots] = at.float()
        return (blocks, slots), places

    def _angle(self, rotation: Rotation | NoRotation, at: torch.Tensor, *,
               back: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        if isinstance(rotation, NoRotation):
            return None
        key = id(rotation), len(at), back
        if key not in self._angles:
            cos, sin = rotation.angles(at)
            norm = cos * cos + sin * sin  # tables may carry a magnitude
            self._angles[key] = (cos / norm, -sin / norm) if back else (cos, sin)
        return self._angles[key]


def _turned(rotation: Rotation | NoRotation, keys: torch.Tensor,
            angles: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    return keys if isinstance(rotation, NoRotation) or angles is None else rotation.apply(keys, *angles)
