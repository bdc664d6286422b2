"""What the quality guard does on streams of audits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from blendrag import BlendConfig, QualityGuard
from blendrag.errors import ConfigError
from blendrag.guard import Monitor
from blendrag.guard.ladder import Ladder, Level
from blendrag.policies import CacheBlend, Exact, First, Full, NoRecompute, Policy, Query

GUARD = QualityGuard(max_kl=0.3)


def climb(ladder: Ladder, kls: Sequence[float], same: bool = True) -> list[Level]:
    """The level after each audit, all policies that are watched finding the same."""
    levels = []
    for kl in kls:
        watched = ladder.watched
        ladder.add(watched, [kl] * len(watched), [same] * len(watched))
        levels.append(ladder.level)
    return levels


def stream(mean: float, count: int, seed: int) -> list[float]:
    """KL divergences as skewed as real ones."""
    return list(np.random.default_rng(seed).exponential(mean, count))


def changes(levels: list[Level]) -> int:
    return sum(a is not b for a, b in pairwise(levels))


@pytest.mark.parametrize("seed", range(5))
def test_what_is_good_stays(seed: int) -> None:
    assert set(climb(Ladder(Query(), GUARD), stream(0.15, 400, seed))) == {Level.AS_ASKED}


@pytest.mark.parametrize("past", [0, 30, 200])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_bad_is_off_within_fifty_audits_whatever_was_before(past: int, seed: int) -> None:
    ladder = Ladder(Query(), GUARD)
    climb(ladder, stream(0.1, past, seed))
    levels = climb(ladder, stream(1.5, 50, seed + 10))
    assert Level.RAISED in levels
    assert levels[-1] is Level.OFF


def test_a_higher_ratio_may_be_enough() -> None:
    ladder = Ladder(Query(), GUARD)
    for asked, higher in zip(stream(0.8, 300, 1), stream(0.1, 300, 2), strict=True):
        ladder.add(ladder.watched, [asked, higher][: len(ladder.watched)], [True, True][: len(ladder.watched)])
    assert ladder.level is Level.RAISED
    assert ladder.policy == Query(ratio=0.3)
    assert not ladder.asked.good


def test_it_comes_back_when_it_is_good_again() -> None:
    ladder = Ladder(Query(), GUARD)
    assert climb(ladder, stream(3, 120, 0))[-1] is Level.OFF
    levels = climb(ladder, stream(0.05, 150, 1))
    assert levels[-1] is Level.AS_ASKED
    assert changes(levels) <= 2
    assert ladder.watched == [Query()]


def test_no_ratio_to_raise_means_off() -> None:
    levels = climb(Ladder(NoRecompute(), GUARD), stream(3, 20, 0))
    assert set(levels) == {Level.AS_ASKED, Level.OFF}


@pytest.mark.parametrize("mean", [0.27, 0.3, 0.33])
def test_it_does_not_flap_at_the_threshold(mean: float) -> None:
    for seed in range(3):
        assert changes(climb(Ladder(Query(), GUARD), stream(mean, 1000, seed))) <= 2


def test_one_outlier_is_no_evidence() -> None:
    for outlier in (1e6, float("inf"), float("nan")):
        assert set(climb(Ladder(Query(), GUARD), [0.01] * 20 + [outlier] + [0.01] * 20)) == {Level.AS_ASKED}


def test_agreement_counts_where_it_is_asked_for() -> None:
    guard = QualityGuard(min_top1=0.6)
    ladder = Ladder(NoRecompute(), guard)
    assert climb(ladder, [0.01] * 50, same=False)[-1] is Level.OFF
    assert climb(ladder, [0.01] * 100, same=True)[-1] is Level.AS_ASKED
    assert climb(Ladder(NoRecompute(), GUARD), [0.01] * 50, same=False)[-1] is Level.AS_ASKED


def test_what_was_asked_for_before_a_change_of_level_still_counts() -> None:
    ladder = Ladder(Query(), GUARD)
    climb(ladder, [3.0] * 30)
    before = ladder.asked.samples
    ladder.add([Query()], [3.0], [False])
    assert ladder.asked.samples == before + 1


@pytest.mark.parametrize(("policy", "higher"), [
    (Query(), Query(ratio=0.3)), (Query(ratio=0.4), Query(ratio=0.5)), (Query(ratio=0.5), None),
    (First(), First(tokens=32)), (NoRecompute(), None), (Exact(), None), (Full(), None),
    (CacheBlend(), CacheBlend(ratio=0.3)),
    (CacheBlend(check_layers=(1, 2), ratio=(0.6, 0.2)), CacheBlend(check_layers=(1, 2), ratio=(0.6, 0.4))),
    (CacheBlend(check_layers=(1, 2), ratio=(0.4, 0.3)), CacheBlend(check_layers=(1, 2), ratio=(0.5, 0.5))),
    (CacheBlend(check_layers=(1, 2), ratio=(0.6, 0.5)), None),
    (Query(ratio=0), None), (CacheBlend(ratio=0), None), (First(tokens=0), None)])
def test_twice_as_much(policy: Policy, higher: Policy | None) -> None:
    assert policy.stronger() == higher


# All policies of an engine.


def test_each_policy_has_its_own_ladder(caplog: pytest.LogCaptureFixture) -> None:
    monitor = Monitor(GUARD)
    with caplog.at_level(logging.INFO, "blendrag.guard"):
        for _ in range(20):
            monitor.add(NoRecompute(), monitor.ladder(NoRecompute()).watched, [2.0], [False])
            monitor.add(Query(), [Query()], [0.02], [True])
    monitor.drop(Query())
    monitor.fail(Query())
    none, query = sorted(monitor.quality(), key=lambda quality: quality.policy)
    assert (none.policy, none.level, query.policy, query.level) == ("none", "blending off", "query", "as asked")
    assert (none.audited, query.audited, query.dropped, query.failed) == (20, 20, 1, 1)
    assert none.kl == pytest.approx(2.0)
    assert none.kl_low > 0.3
    assert none.top1 == 0
    assert query.kl == pytest.approx(0.02)
    assert query.kl_low < 0.02 < query.kl_high
    assert query.top1 == 1
    [line] = [record.getMessage() for record in caplog.records]
    assert "policy none now get: blending off" in line
    assert "the mean KL of the first token is 2 (" in line


def test_the_log_tells_the_agreement_where_it_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    monitor = Monitor(QualityGuard(min_top1=0.9))
    with caplog.at_level(logging.INFO, "blendrag.guard"):
        for _ in range(40):
            monitor.add(NoRecompute(), monitor.ladder(NoRecompute()).watched, [0.0], [False])
    assert "likeliest first token is a full prefill's is 0 (0 to " in caplog.records[0].getMessage()
    assert "0.9 is asked for)" in caplog.records[0].getMessage()


def test_a_policy_without_audits_is_told_as_unknown() -> None:
    monitor = Monitor(GUARD)
    monitor.ladder(Query(ratio=0.25))
    [told] = monitor.quality()
    assert (told.policy, told.samples, told.kl, told.top1) == ("query(ratio=0.25)", 0, None, None)
    assert (told.kl_low, told.kl_high) == pytest.approx((0, 3), abs=1e-6)


def test_clients_cannot_fill_the_memory_with_policies() -> None:
    monitor = Monitor(GUARD)
    for number in range(200):
        monitor.ladder(Query(ratio=number / 200))
    assert len(monitor.quality()) == 64


def test_what_is_off_is_not_forgotten_for_what_clients_name() -> None:
    monitor = Monitor(GUARD)
    for _ in range(20):
        monitor.add(NoRecompute(), [NoRecompute()], [2.0], [False])
    for number in range(200):
        monitor.ladder(Query(ratio=number / 200))
    assert {quality.policy: quality.level for quality in monitor.quality()}["none"] == "blending off"


def test_names_leave_out_what_is_usual() -> None:
    assert (Query().label, Query(ratio=0.3).label) == ("query", "query(ratio=0.3)")


# Settings.


@pytest.mark.parametrize("form", [{"share": 0.1}, '{"share": 0.1}', QualityGuard(share=0.1)])
def test_settings_take_any_form(form: object, monkeypatch: pytest.MonkeyPatch) -> None:
    config = BlendConfig(quality_guard=form)
    assert config.quality_guard == QualityGuard(share=0.1)
    assert BlendConfig(**config.model_dump(mode="json")) == config
    monkeypatch.setenv("BLENDRAG_QUALITY_GUARD", '{"share": 0.1}')
    assert BlendConfig() == config


def test_a_guard_can_be_turned_on_and_off_in_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BlendConfig(quality_guard=True).quality_guard == QualityGuard()
    assert BlendConfig(quality_guard=False).quality_guard is None
    monkeypatch.setenv("BLENDRAG_QUALITY_GUARD", "true")
    assert BlendConfig().quality_guard == QualityGuard()


@pytest.mark.parametrize(("form", "remedy"), [
    ({"shares": 1}, "choose from share"), ({"share": 2}, "share: input should be less than or equal to 1"),
    ({"max_kl": float("inf")}, "max_kl: input should be less than or equal to 1000"),
    ("{", "it is no JSON"), (3, "should be a valid dictionary")])
def test_settings_that_make_no_sense_are_refused(form: object, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        BlendConfig(quality_guard=form)


def test_the_log_tells_what_the_raised_ratio_came_to(caplog: pytest.LogCaptureFixture) -> None:
    monitor = Monitor(GUARD)
    with caplog.at_level(logging.INFO, "blendrag.guard"):
        for _ in range(40):
            watched = monitor.ladder(Query()).watched
            monitor.add(Query(), watched, [2.0, 1.5][: len(watched)], [False] * len(watched))
    up, off = [record.getMessage() for record in caplog.records]
    assert "now get: ratio raised.  In " in up
    assert "blending off" in off
    assert "of query the mean KL of the first token is 2 (" in off
    assert "of query(ratio=0.3) the mean KL of the first token is 1.5 (" in off
