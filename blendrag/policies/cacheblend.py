"""CacheBlend (Yao et al., EuroSys 2025, arXiv 2405.16444): the tokens whose KV deviates most."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from blendrag.policies.base import Deviation, Evidence, Layout, Policy, Share, best


@dataclass(frozen=True)
class CacheBlend(Policy):
    """Computes all rows up to the check layer and keeps those with the largest deviation.

    Attributes:
        ratio: share of the reused tokens to recompute, 0 to 1.
        check_layer: layer whose keys or values are compared; the paper's code uses 1.
        deviation: compare keys ("k", LMCache's choice) or values ("v", the paper's code).
    """

    name: ClassVar[str] = "cacheblend"

    ratio: Share = 0.15
    check_layer: Annotated[int, Field(ge=0)] = 1
    deviation: Literal["k", "v"] = "k"

    def evidence(self, num_layers: int) -> Evidence:
        return Deviation(layer=min(self.check_layer, num_layers - 1), of=self.deviation)

    def select(self, layout: Layout, scores: torch.Tensor | None) -> torch.Tensor:
        assert scores is not None
        return best(layout, scores, self.ratio)
