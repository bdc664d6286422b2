"""Query-aware selection (InfoFlow KV, arXiv 2603.05353): the tokens that the question attends to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import AfterValidator

from blendrag.policies.base import Attention, Dependence, Evidence, Layout, Reach, Selective, Share, best, twice


def _ascending(layers: tuple[float, float]) -> tuple[float, float]:
    if layers[0] > layers[1]:
        raise ValueError("the first share is larger than the second: swap them")
    return layers


@dataclass(frozen=True)
class Query(Selective):
    """Runs the question over the stored context and recomputes what it looks at.

    Attributes:
        ratio: share of the reused tokens to recompute, 0 to 1.
        layers: `(from, to)` as shares of the depth; attention is measured in these layers.
        over_rows: reduce over the question's tokens by L2 "norm" (InfoFlow's code) or "mean".
        reach: see `Selective`.
    """

    name: ClassVar[str] = "query"

    ratio: Share = 0.15
    layers: Annotated[tuple[Share, Share], AfterValidator(_ascending)] = (0.66, 0.8)
    over_rows: Literal["norm", "mean"] = "norm"
    reach: Reach = field(default=64.0, kw_only=True)

    @property
    def depends_on(self) -> Dependence:
        return "prompt"

    def stronger(self) -> Query | None:
        ratio = twice(self.ratio)
        return replace(self, ratio=ratio) if ratio != self.ratio else None

    def evidence(self, num_layers: int) -> tuple[Evidence, ...]:
        first = min(int(self.layers[0] * num_layers), num_layers - 1)
        last = max(first + 1, round(self.layers[1] * num_layers))
        return (Attention(layers=tuple(range(first, min(last, num_layers))), over_rows=self.over_rows),)

    def select(self, layout: Layout, scores: torch.Tensor | None, step: int = 0) -> torch.Tensor:
        assert scores is not None
        return best(layout, scores, self.ratio)

    def share_left(self, step: int) -> float:
        return self.ratio
