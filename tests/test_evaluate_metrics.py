"""The measures, against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from blendrag.evaluate.metrics import Distribution, divergence, exact_match, f1, first_line, interval, mean, normalise


def distribution(shares: dict[int, float]) -> Distribution:
    ids = sorted(shares)
    with np.errstate(divide="ignore"):
        return Distribution(np.array(ids, np.int64), np.log(np.array([shares[i] for i in ids])))


def test_answers_are_compared_as_squad_does() -> None:
    assert normalise("  The Lighthouse, at  a Point. ") == "lighthouse at point"
    assert exact_match("the Eller!", ["Linn", "Eller"]) == 1
    assert exact_match("river Eller", ["Eller"]) == 0


def test_f1_counts_words_that_both_have() -> None:
    # 2 of 3 words are right, 2 of 4 were found: precision 2/3, recall 1/2.
    assert f1("Sir Francis Smith", ["Sir Francis Baring, Baronet"]) == pytest.approx((2 / 3) / (2 / 3 + 1 / 2))
    assert f1("red red blue", ["red"]) == pytest.approx(1 / 2), "a word counts as often as both have it"
    assert f1("yes", ["no", "yes"]) == 1
    assert f1("Madrid", ["Paris"]) == 0
    assert f1("the", ["a"]) == 1, "nothing is left of either"
    assert f1("", ["Paris"]) == 0


def test_a_model_that_goes_on_talking_is_heard_to_the_end_of_the_line() -> None:
    assert first_line("\n  Tarn Bridge \nHe was born there.") == "Tarn Bridge"
    assert first_line(" \n") == ""


def test_divergence_over_a_whole_vocabulary_is_exact() -> None:
    full, other = distribution({0: 0.5, 1: 0.25, 2: 0.25}), distribution({0: 0.25, 1: 0.5, 2: 0.25})
    assert divergence(full, full) == 0
    assert divergence(full, other) == pytest.approx(0.25 * math.log(2))
    assert divergence(distribution({0: 1.0, 1: 0.0}), distribution({0: 0.5, 1: 0.5})) == pytest.approx(math.log(2))


def test_what_one_holds_for_impossible_is_very_far_off_and_not_infinitely() -> None:
    full, masked = distribution({0: 0.5, 1: 0.5}), Distribution(np.arange(2), np.array([0.0, -np.inf]))
    assert 40 < divergence(full, masked) < 50


def test_what_only_one_distribution_names_is_one_outcome() -> None:
    full, other = distribution({3: 0.6, 5: 0.3}), distribution({3: 0.4, 9: 0.5})
    expected = 0.6 * math.log(0.6 / 0.4) + 0.4 * math.log(0.4 / 0.6)
    assert divergence(full, other) == pytest.approx(expected)
    assert divergence(other, full) == pytest.approx(0.4 * math.log(0.4 / 0.6) + 0.6 * math.log(0.6 / 0.4))


def test_naming_fewer_tokens_only_lowers_the_divergence() -> None:
    rng = np.random.default_rng(1)
    p, q = (np.log(rng.dirichlet(np.full(50, 0.3))) for _ in range(2))
    ids = np.arange(50)
    exact = divergence(Distribution(ids, p), Distribution(ids, q))
    found = []
    for top in (3, 10, 40, 50):
        mine, theirs = np.argsort(-p)[:top], np.argsort(-q)[:top]
        found.append(divergence(Distribution(mine, p[mine]), Distribution(theirs, q[theirs])))
    assert all(0 <= value <= exact + 1e-9 for value in found)
    assert found[-1] == pytest.approx(exact)


def test_distributions_with_nothing_in_common_stay_finite() -> None:
    assert math.isfinite(divergence(distribution({1: 1.0}), distribution({2: 1.0})))


def test_what_is_not_a_number_has_no_divergence() -> None:
    ids = np.arange(3)
    full = Distribution(ids, np.log([0.5, 0.25, 0.25]))
    assert np.isnan(divergence(full, Distribution(ids, np.full(3, np.nan))))


def test_the_likeliest_token() -> None:
    assert distribution({4: 0.2, 7: 0.5, 9: 0.3}).likeliest == 7
    assert distribution({9: 0.5, 7: 0.5}).likeliest == 7


def test_means_and_intervals() -> None:
    assert mean([]) is None
    assert mean([1.0, 2.0]) == 1.5
    assert interval([]) is None
    assert interval([0.25]) == (0.25, 0.25)
    values = [0.0, 1.0] * 50
    low, high = interval(values) or (0, 0)
    # The mean's standard error is 0.05: 95 % of resamples lie within 1.96 of it.
    assert (low, high) == pytest.approx((0.402, 0.598), abs=0.02)
    assert interval(values) == (low, high), "the same every time"
    narrow = interval(values, level=0.5) or (0, 0)
    assert low < narrow[0] < narrow[1] < high
