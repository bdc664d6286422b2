"""The figures of a load: percentiles, goodput, the ledger of prompt tokens, and whether the speed lasts."""

from __future__ import annotations

import pytest

from blendrag.bench.load.clients import Reply, Usage
from blendrag.bench.load.figures import Figures, Goal, Ledger, Quantiles, slowdown
from blendrag.bench.load.run import Load, Run
from blendrag.errors import BlendError, ConfigError


def reply(number: int = 0, first: float = 0.1, each: float = 0.02, tokens: int = 5,
          usage: Usage | None = None) -> Reply:
    moments = tuple(10 + first + each * token for token in range(tokens))
    return Reply(number, 10, moments, usage or Usage(100, 40, 30, tokens, 0.5))


def test_quantiles_are_interpolated_milliseconds() -> None:
    assert Quantiles.of(number / 1000 for number in range(101)) == Quantiles(50, 95, 99, 100)
    assert Quantiles.of([0.25]) == Quantiles(250, 250, 250, 250)
    assert Quantiles.of([]) is None


def test_times_of_a_reply() -> None:
    one = reply(first=0.1, each=0.02, tokens=5)
    assert one.first_token_s == pytest.approx(0.1)
    assert one.token_s == pytest.approx(0.02)
    assert [gap for _, gap in one.gaps] == pytest.approx([0.02] * 4)
    assert reply(tokens=1).token_s is None


@pytest.mark.parametrize(("goals", "first", "each", "good"), [
    (["ttft:100.5", "tpot:20.5"], 0.1, 0.02, True),
    (["ttft:99 tpot:21"], 0.1, 0.02, False),
    (["ttft:101", "tpot:19"], 0.1, 0.02, False),
    (["tpot:21"], 9.0, 0.02, True),
    ([], 9.0, 9.0, True),
])
def test_a_good_request_meets_every_goal(goals: list[str], first: float, each: float, good: bool) -> None:
    assert Goal.parse(goals).met(reply(first=first, each=each)) is good


def test_a_request_that_failed_is_not_good() -> None:
    assert not Goal().met(Reply(0, 0, failure="refused"))


@pytest.mark.parametrize("goal", ["ttft", "ttft:fast", "ttft:-5", "ttft:nan", "itl:3", "500"])
def test_a_goal_of_another_form_is_refused(goal: str) -> None:
    with pytest.raises(ConfigError, match="write ttft:MS or tpot:MS"):
        Goal.parse([goal])


def test_the_ledger_adds_up() -> None:
    usages = [Usage(100, 40, 30, 5), Usage(200, 0, 0, 5)]
    assert Ledger.of(usages) == Ledger(prompt=300, computed=260, cached=10, reused=30)


def test_a_ledger_whose_split_is_known_in_total_only() -> None:
    usages = [Usage(100, 40, None, 5), Usage(200, 50, None, 5)]
    assert Ledger.of(usages, reused=70) == Ledger(prompt=300, computed=210, cached=20, reused=70)
    assert Ledger.of(usages) == Ledger(prompt=300, computed=210, cached=90, reused=None)


@pytest.mark.parametrize("usage", [Usage(100, 20, 30, 5), Usage(100, 120, 30, 5)])
def test_counts_that_contradict_each_other_are_an_error(usage: Usage) -> None:
    with pytest.raises(BlendError, match="do not add up"):
        Ledger.of([usage])


def test_the_last_requests_are_compared_with_the_first() -> None:
    assert slowdown([1.0] * 20 + [5.0] * 30 + [2.0] * 20) == 2
    assert slowdown([1.0] * 39) is None


def test_figures_of_a_run() -> None:
    replies = [reply(number, first=0.1 if number < 30 else 0.3) for number in range(50)]
    run = Run([*replies, Reply(50, 0, failure="refused")], [reply(first=0.05, tokens=1)], [0.02, 0.5], seconds=10)
    figures = Figures.of("blended", Load(rate=5), run, Goal(ttft_ms=200))
    assert (figures.requests, figures.failed, figures.failure) == (51, 1, "refused")
    assert (figures.throughput, figures.goodput) == (5, 3)
    assert figures.ttft is not None
    assert figures.ttft.p50 == pytest.approx(100)
    assert figures.ttft.p99 == pytest.approx(300)
    assert figures.tpot is not None
    assert figures.tpot.p95 == pytest.approx(20)
    assert figures.gaps is not None
    assert figures.gaps.longest == 500
    assert figures.probes is not None
    assert figures.probes.p50 == pytest.approx(50)
    assert figures.ledger == Ledger(5000, 3000, 500, 1500)
    assert figures.rows == 0.5
    assert figures.batches_ms == pytest.approx([100, 200, 300])
    assert figures.slowdown == pytest.approx(3)
    assert figures.to_dict()["ledger"]["reused"] == 1500
