"""All rows: the blend pass is a full prefill, and must equal plain vLLM."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from blendrag.policies.base import Dependence, Layout, Policy


@dataclass(frozen=True)
class Full(Policy):
    """Recomputes every token.  The conformance test of the whole machine."""

    name: ClassVar[str] = "full"
    recomputes_all: ClassVar[bool] = True

    @property
    def depends_on(self) -> Dependence:
        return "entries"

    def select(self, layout: Layout, scores: torch.Tensor | None, step: int = 0) -> torch.Tensor:
        return layout.reused.clone()
