"""How sure a few questions make: bounds that are passed as rarely as they say."""

from __future__ import annotations

import numpy as np
import pytest

from blendrag.calibrate.proof import CONFIDENCE, fewest_for, kl_interval, share_proven


@pytest.mark.parametrize(("n", "most"), [(5, 0.12), (15, 0.085), (30, 0.085)])
def test_the_mean_of_skewed_values_is_seldom_above_the_upper_end(n: int, most: float) -> None:
    random = np.random.default_rng(1)
    above = [kl_interval(random.exponential(size=n).tolist())[1] < 1.0 for _ in range(400)]
    assert np.mean(above) < most


def test_an_interval_holds_the_mean_and_nothing_below_zero() -> None:
    values = [0.01, 0.02, 0.05, 0.4, 0.02, 0.03]
    low, high = kl_interval(values)
    assert 0 <= low < np.mean(values) < high
    assert kl_interval(values) == (low, high)
    assert kl_interval([0.1] * 5) == (0.1, 0.1)


def test_one_value_that_differs_has_no_upper_end() -> None:
    assert kl_interval([0.0, 0.0, 0.0, 0.0, 0.4]) == (0.0, np.inf)


@pytest.mark.parametrize(("count", "of", "least", "proven"), [
    (5, 5, 0.9, False), (5, 5, 0.5, True), (28, 28, 0.9, False), (29, 29, 0.9, True), (28, 29, 0.9, False),
    (0, 29, 0.1, False), (46, 46, 0.9, True)])
def test_a_share_is_proven_by_enough_questions_only(count: int, of: int, least: float, proven: bool) -> None:
    assert share_proven(count, of, least) == proven


def test_a_share_of_very_many_questions() -> None:
    assert not share_proven(2_525, 5_000, 0.5)
    assert share_proven(2_560, 5_000, 0.5)
    assert share_proven(0, 5_000, 0)


@pytest.mark.parametrize("least", [0.01, 0.5, 0.9, 0.95, 0.999])
def test_the_fewest_questions_that_prove_a_share(least: float) -> None:
    n = fewest_for(least)
    assert share_proven(n, n, least)
    assert n == 1 or not share_proven(n - 1, n - 1, least)
    assert least ** n <= 1 - CONFIDENCE + 1e-12
