"""No rows: stored KV is moved to its place and used as it is."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from blendrag.policies.base import Dependence, Layout, Policy


@dataclass(frozen=True)
class NoRecompute(Policy):
    """Recomputes nothing.  The fastest, and on multi-hop questions the worst, answer."""

    name: ClassVar[str] = "none"

    @property
    def depends_on(self) -> Dependence:
        return "entries"

    def select(self, layout: Layout, scores: torch.Tensor | None, step: int = 0) -> torch.Tensor:
        return torch.zeros_like(layout.reused)

    def share_left(self, step: int) -> float:
        return 0.0
