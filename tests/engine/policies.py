"""A policy as a user writes it: it recomputes the last tokens of each chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from blendrag.policies import Dependence, Layout, Policy


@dataclass(frozen=True)
class Last(Policy):
    """Recomputes the last `tokens` tokens of each chunk."""

    name: ClassVar[str] = "last"

    tokens: int = 8

    @property
    def depends_on(self) -> Dependence:
        return "entries"

    def select(self, layout: Layout, scores: torch.Tensor | None, step: int = 0) -> torch.Tensor:
        chosen = torch.zeros_like(layout.reused)
        for start, end in layout.chunks:
            chosen[max(start, end - self.tokens) : end] = True
        return chosen


@dataclass(frozen=True)
class Broken(Policy):
    """Returns numbers where truth values belong."""

    name: ClassVar[str] = "broken"

    def select(self, layout: Layout, scores: torch.Tensor | None, step: int = 0) -> torch.Tensor:
        return layout.reused.float()
