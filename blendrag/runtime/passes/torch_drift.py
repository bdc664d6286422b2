"""Moves what is not recomputed along with what is, in torch: for the CPU."""

from __future__ import annotations

from itertools import pairwise

import torch

from blendrag.runtime.model.rotation import NoRotation, Rotation
from blendrag.runtime.passes.averages import Averages

Angles = tuple[torch.Tensor, torch.Tensor]


class DriftProducts:
    """The averages of one prompt; see `blendrag.runtime.passes.drift`.

    Blocks are of different sizes, and a product for each takes less time than one of all, filled up to the largest.
    """

    def __init__(self, averages: Averages) -> None:
        self._probes, self._probes_at, self._stale = averages.probes, averages.probes_at, averages.stale
        self._overall = averages.overall[averages.stale_slots]
        blocks = len(averages.local)
        self._pieces = [
            (stale, probes, averages.local[block, : stale.stop - stale.start, : probes.stop - probes.start])
            for block, (stale, probes) in enumerate(zip(_cut(averages.stale_slots[0], blocks),
                                                        _cut(averages.probe_slots[0], blocks), strict=True))
            if stale.start < stale.stop and probes.start < probes.stop]
        self._angles: dict[int, tuple[Angles, Angles]] = {}

    def apply(self, k: torch.Tensor, v: torch.Tensor, all_k: torch.Tensor, all_v: torch.Tensor,
              rotation: Rotation | NoRotation) -> None:
        """Moves the stale tokens of a layer, in place; the arguments are `Drift.apply`'s."""
        change_k, change_v = k[self._probes] - all_k[self._probes_at], v[self._probes] - all_v[self._probes_at]
        if not isinstance(rotation, NoRotation):
            # Changes are compared without rotation: the same change looks different at every position.
            back, forth = self._angles_of(rotation)
            change_k = rotation.apply(change_k, *back)
        change = torch.cat([change_k, change_v], -1)
        flat = change.flatten(1)
        moved = self._overall * flat.float().mean(0).to(flat.dtype)
        for stale, probes, local in self._pieces:
            moved[stale].addmm_(local, flat[probes])
        moved_k, moved_v = torch.split(moved.view(-1, *change.shape[1:]), k.shape[-1], -1)
        if not isinstance(rotation, NoRotation):
            moved_k = rotation.apply(moved_k, *forth)
        for stored, by in ((all_k, moved_k), (all_v, moved_v)):  # index_add_ takes four times as long
            stored.index_copy_(0, self._stale, stored[self._stale] + by)

    def _angles_of(self, rotation: Rotation) -> tuple[Angles, Angles]:
        """What turns the probes back, and the stale tokens to their places."""
        if id(rotation) not in self._angles:
            cos, sin = rotation.angles(self._probes_at)
            norm = cos * cos + sin * sin  # tables may carry a magnitude
            self._angles[id(rotation)] = (cos / norm, -sin / norm), rotation.angles(self._stale)
        return self._angles[id(rotation)]


def _cut(blocks: torch.Tensor, count: int) -> list[slice]:
    """Which of some tokens, in order of their positions, are in each of `count` blocks; `blocks` are theirs."""
    ends = torch.bincount(blocks, minlength=count).cumsum(0).tolist()
    return [slice(start, end) for start, end in pairwise([0, *ends])]
