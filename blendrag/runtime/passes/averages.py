"""Which recomputed tokens a token that keeps stored KV goes by, and with what weights; see `Drift`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from blendrag.policies import Layout

_BLOCK = 512
"""Tokens of a chunk that are looked at together; a recomputed one counts within its block."""

_SLOTS = 8
"""Slots of a block come in multiples of this: of other widths cuBLAS takes a kernel that is four times slower."""

_OVERALL = 0.5
"""Weight of the average over all chunks, in recomputed neighbours that stand right beside a token."""


@dataclass(frozen=True)
class Averages:
    """Which changes a token that keeps stored KV takes the average of, as one matrix product a block.

    Attributes:
        probes: int64 [probes], places of the recomputed tokens among the rows of the pass.
        probes_at: int64 [probes], their positions.
        probe_slots: `(block, slot)` of each, int64 [probes] both.
        stale: int64 [stale], positions of the tokens that take an average.
        stale_slots: `(block, slot)` of each, int64 [stale] both.
        local: [blocks, stale slots, probe slots], weights of the probes.
        overall: [blocks, stale slots, 1], weight of the average over all probes; the weights of a token add up to 1.
    """

    probes: torch.Tensor
    probes_at: torch.Tensor
    probe_slots: tuple[torch.Tensor, torch.Tensor]
    stale: torch.Tensor
    stale_slots: tuple[torch.Tensor, torch.Tensor]
    local: torch.Tensor
    overall: torch.Tensor


class Neighbours:
    """What stands around the stale tokens of one prompt: reused, and not computed by the pass.

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

    def averages(self, positions: torch.Tensor, dtype: torch.dtype) -> Averages | None:
        """What moves where the tokens at `positions` (int64 [rows]) are computed; None where nothing does."""
        stale = self._stale.nonzero()[:, 0]
        probes = (self._block[positions] >= 0).nonzero()[:, 0]
        if not len(stale) or not len(probes):
            return None
        at = positions[probes]
        probe_slots, probe_places = self._slots(at)
        stale_slots, stale_places = self._slots(stale)
        distance = (stale_places[:, :, None] - probe_places[:, None, :]).abs_()
        local = distance.div_(-self._reach).exp_()  # 0 where either is a filler: infinitely far away
        local.nan_to_num_(0.0)
        total = local.sum(2, keepdim=True) + _OVERALL
        return Averages(probes, at, probe_slots, stale, stale_slots, (local / total).to(dtype),
                        (_OVERALL / total).to(dtype))

    def _slots(self, at: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        """`(block, slot)` of each position, and float32 [blocks, slots] with the position in each slot."""
        blocks = self._block[at]
        counts = torch.bincount(blocks, minlength=self._blocks)
        slots = torch.arange(len(at), device=at.device) - (counts.cumsum(0) - counts)[blocks]
        width = -(-int(counts.max()) // _SLOTS) * _SLOTS
        places = torch.full((self._blocks, width), torch.inf, device=at.device)
        places[blocks, slots] = at.float()
        return (blocks, slots), places
