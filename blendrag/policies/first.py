"""EPIC / LegoLink (Hu et al., ICML 2025, arXiv 2410.15332): the first tokens of each chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from blendrag.policies.base import Dependence, Layout, Selective


@dataclass(frozen=True)
class First(Selective):
    """Recomputes the first `tokens` tokens of each chunk, where its attention sinks are.

    Needs no evidence, so the rows are known before anything is loaded.
    """

    name: ClassVar[str] = "first"

    tokens: Annotated[int, Field(ge=0)] = 16

    @property
    def depends_on(self) -> Dependence:
        return "chunks" if self.reach else "entries"

    def stronger(self) -> First | None:
        return replace(self, tokens=2 * self.tokens) if self.tokens else None

    def select(self, layout: Layout, scores: torch.Tensor | None, step: int = 0) -> torch.Tensor:
        chosen = torch.zeros_like(layout.reused)
        for start, end in layout.chunks:
            chosen[start : min(end, start + self.tokens)] = True
        return chosen

    def recomputed(self, lengths: Sequence[int], num_layers: int) -> int:
        return sum(min(length, self.tokens) for length in lengths)
