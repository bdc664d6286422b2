"""CacheBlend (Yao et al., EuroSys 2025, arXiv 2405.16444): the tokens whose KV deviates most."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from blendrag.errors import ConfigError
from blendrag.policies.base import Dependence, Deviation, Evidence, Layout, Selective, Share, best, twice

LayerIndex = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class CacheBlend(Selective):
    """Computes all rows up to the check layer and keeps those with the largest deviation.

    With several check layers it is the paper's gradual filtering: the rows kept at one are computed up to the
    next, where some of them are left out again.

    Attributes:
        ratio: share of the reused tokens to recompute, 0 to 1; or one for each check layer, not growing.
        check_layers: layer, or layers, whose keys or values are compared; the paper's code uses 1.
        deviation: compare keys ("k", LMCache's choice) or values ("v", the paper's code).

    Raises:
        ConfigError: check layers that do not ascend, or ratios that do not fit them.
    """

    name: ClassVar[str] = "cacheblend"

    ratio: Share | tuple[Share, ...] = 0.15
    check_layers: LayerIndex | tuple[LayerIndex, ...] = (1,)
    deviation: Literal["k", "v"] = "k"

    def __post_init__(self) -> None:
        layers, ratios = self._layers(), self._ratios()
        if not layers or any(a >= b for a, b in pairwise(layers)):
            raise ConfigError(f"policy 'cacheblend': check_layers: {layers} do not ascend: name each layer once, "
                              "the first one first")
        if len(ratios) != len(layers):
            raise ConfigError(f"policy 'cacheblend': ratio: {len(ratios)} ratios for {len(layers)} check layers: "
                              "give one, or one for each")
        if any(a < b for a, b in pairwise(ratios)):
            raise ConfigError(f"policy 'cacheblend': ratio: {ratios} grows: a check layer chooses among the tokens "
                              "that the one before it chose, so order them from the largest to the smallest")

    @property
    def depends_on(self) -> Dependence:
        return "chunks"  # deviations follow from what precedes a token, and the largest of all chunks' are chosen

    def stronger(self) -> CacheBlend | None:
        ratio = tuple(map(twice, self.ratio)) if isinstance(self.ratio, tuple) else twice(self.ratio)
        return replace(self, ratio=ratio) if ratio != self.ratio else None

    def evidence(self, num_layers: int) -> tuple[Evidence, ...]:
        layers = self._layers()
        latest = range(num_layers - len(layers), num_layers)  # where each layer can be and leave room for the rest
        return tuple(Deviation(max(0, min(pair)), self.deviation) for pair in zip(layers, latest, strict=True))

    def select(self, layout: Layout, scores: torch.Tensor | None, step: int = 0) -> torch.Tensor:
        assert scores is not None
        return best(layout, scores, self._ratios()[step])

    def share_left(self, step: int) -> float:
        return self._ratios()[step]

    def _layers(self) -> tuple[int, ...]:
        return (self.check_layers,) if isinstance(self.check_layers, int) else self.check_layers

    def _ratios(self) -> tuple[float, ...]:
        return self.ratio if isinstance(self.ratio, tuple) else (self.ratio,) * len(self._layers())
