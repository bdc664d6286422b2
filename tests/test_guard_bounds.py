"""Bounds of means that hold whenever one looks."""

from __future__ import annotations

import math

import numpy as np
import pytest

from blendrag.guard.bounds import bounds, exceeds, falls_below

SEVERAL = np.random.default_rng(0)


def test_nothing_is_known_of_nothing() -> None:
    assert bounds(np.array([]), 0.95) == pytest.approx((0, 1), abs=1e-6)
    assert not exceeds(np.array([]), 0.1, 0.95, 200)
    assert not falls_below(np.array([]), 0.1, 0.95, 200)


@pytest.mark.parametrize("count", [5, 20, 100])
def test_bounds_of_equal_values_are_those_that_can_be_computed_by_hand(count: int) -> None:
    """After n zeros, who stakes s on the mean m being less has (1 + s m / (1 - m))^n."""
    stakes = [1 / (1 + math.exp(4.5 - 0.6 * number)) for number in range(16)]
    low, high = bounds(np.zeros(count), 0.95)
    assert low == 0
    assert np.mean([(1 + s * high / (1 - high)) ** count for s in stakes]) == pytest.approx(2 / 0.05, rel=1e-3)
    assert bounds(np.ones(count), 0.95) == pytest.approx((1 - high, 1))


@pytest.mark.parametrize(("hits", "count", "exact"), [
    (0, 50, (0.0, 0.0711)), (3, 50, (0.0125, 0.1655)), (25, 50, (0.3553, 0.6447)), (90, 100, (0.8238, 0.9510))])
def test_they_are_wider_than_an_interval_for_one_look_and_not_by_much(hits: int, count: int,
                                                                      exact: tuple[float, float]) -> None:
    """Clopper and Pearson's interval of a share, which holds for a single look."""
    low, high = bounds((np.arange(count) < hits) * 1.0, 0.95)
    assert low <= exact[0]
    assert high >= exact[1]
    assert high - low < 1.6 * (exact[1] - exact[0])


def test_they_shrink_with_samples_and_grow_with_confidence() -> None:
    values = SEVERAL.beta(1, 9, 400)
    widths = [high - low for low, high in (bounds(values[:count], 0.95) for count in (25, 100, 400))]
    assert widths[0] > 1.5 * widths[1] > 2.25 * widths[2]
    inner, outer = bounds(values, 0.8), bounds(values, 0.99)
    assert outer[0] < inner[0] < values.mean() < inner[1] < outer[1]


def test_they_do_not_depend_on_the_order() -> None:
    values = SEVERAL.beta(1, 9, 50)
    assert bounds(values, 0.95) == pytest.approx(bounds(values[::-1], 0.95))


def test_who_looks_after_every_value_is_seldom_wrong() -> None:
    """Skewed values, of which most are nearly nothing; 200 streams of 200 looks, at most 5 % may ever be wrong."""
    wrong = 0
    for seed in range(200):
        values = (np.random.default_rng(seed).random(200) < 0.1) * 1.0
        wrong += any(exceeds(values[:count], 0.1, 0.95, 200) or falls_below(values[:count], 0.1, 0.95, 200)
                     for count in range(5, 201, 5))
    assert wrong <= 10


def test_a_change_is_seen_soon_however_good_the_past() -> None:
    values = np.r_[np.full(120, 0.01), np.full(30, 0.5)]
    seen = next(count for count in range(151) if exceeds(values[:count], 0.1, 0.95, 200))
    assert seen <= 135
    assert not bounds(values[:seen], 0.95)[0] > 0.1
