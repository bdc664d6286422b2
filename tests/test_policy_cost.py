"""What scoring passes may cost: no more than a full prefill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from blendrag.errors import ConfigError
from blendrag.policies import (
    POLICIES,
    Attention,
    CacheBlend,
    Deviation,
    Evidence,
    Layout,
    Policy,
    Query,
    require_affordable,
)
from blendrag.policies.cost import scoring_cost

LAYERS = 30


def test_what_is_built_in_is_affordable_with_its_defaults() -> None:
    for kind in POLICIES.values():
        for layers in (1, 2, 4, LAYERS, 80):
            require_affordable(kind(), layers)


def test_each_step_costs_its_layers_of_the_rows_that_are_left() -> None:
    assert scoring_cost(Query(), LAYERS) == pytest.approx(24 / 30)
    assert scoring_cost(CacheBlend(0.15, 1), LAYERS) == pytest.approx(2 / 30)
    assert scoring_cost(CacheBlend((0.5, 0.2), (1, 14)), LAYERS) == pytest.approx(2 / 30 + 0.5 * 15 / 30)


def test_many_check_layers_of_all_rows_are_refused_by_the_field_that_names_them() -> None:
    with pytest.raises(ConfigError, match="'cacheblend': check_layers: its scoring passes may compute 14 times"):
        require_affordable(CacheBlend(1.0, tuple(range(1, 29))), LAYERS)
    require_affordable(CacheBlend(1.0, 29), LAYERS)


def test_a_policy_that_says_nothing_of_its_shares_counts_in_full() -> None:
    @dataclass(frozen=True)
    class Thorough(Policy):
        name: ClassVar[str] = "thorough"

        def evidence(self, num_layers: int) -> tuple[Evidence, ...]:
            return Deviation(num_layers // 2, "k"), Attention((num_layers // 2,), "mean")

        def select(self, layout: Layout, scores: torch.Tensor | None, step: int = 0) -> torch.Tensor:
            return layout.reused

    with pytest.raises(ConfigError, match="policy 'thorough': evidence"):
        require_affordable(Thorough(), LAYERS)
