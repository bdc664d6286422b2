"""Two tensor-parallel ranks on the CPU pick the same rows and give one rank's answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.two_ranks import CORES, compare


@pytest.fixture(scope="module")
def told(engine_pool: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What an engine of one rank and one of two ranks answer."""
    engine_pool.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*CORES)
        return compare(Path(tmp_path_factory.mktemp("ranks"), "model"))


@pytest.mark.parametrize("policy", ["plain", "full", "query", "cacheblend"])
def test_two_ranks_answer_as_one(told: list[dict[str, Any]], policy: str) -> None:
    one, two = (found[policy] for found in told)
    for (alone, stats_alone), (together, stats_together) in zip(one, two, strict=True):
        assert together == pytest.approx(alone, abs=1e-3)
        counts = ("reused_tokens", "recomputed_tokens", "rows", "chunks_reused", "failure")
        assert [stats_alone[name] for name in counts] == [stats_together[name] for name in counts]


def test_all_rows_are_a_full_prefill_on_two_ranks(told: list[dict[str, Any]]) -> None:
    for (ours, _), (theirs, _) in zip(told[1]["full"], told[1]["plain"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)


def test_the_quality_guard_finds_the_same_on_two_ranks(told: list[dict[str, Any]]) -> None:
    one, two = (found["quality"] for found in told)
    assert set(one) == set(two) == {"none", "query", "cacheblend"}
    for policy, (audited, kl, top1) in one.items():
        assert two[policy] == (audited, pytest.approx(kl, rel=1e-2, abs=1e-6), top1)
        assert audited == 7
    assert one["none"][1] > 0.1 < one["query"][1]


def test_ranks_store_what_requests_bring_and_agree_on_what_is_gone(told: list[dict[str, Any]]) -> None:
    assert told[1]["stored"] == told[0]["stored"] == [True] * 6
    assert told[1]["after"] == [""] * 7


def test_every_rank_forgets_its_share(told: list[dict[str, Any]]) -> None:
    assert told[1]["forgotten"] == told[0]["forgotten"] == [6, False, 6]


def test_a_store_that_fails_on_one_rank_fails_on_all_and_none_waits(told: list[dict[str, Any]]) -> None:
    """A look-up, a write and a deletion are errors that name what is wrong; what cannot be read is computed."""
    for ranks, found in enumerate(told, start=1):
        ended = found["broken"]
        assert len(ended) == 4 * ranks
        for number, (error, after) in enumerate(ended):
            reads = number // ranks == 1
            assert error == "" if reads else error.endswith("the disk is gone: look for it")
            assert after == ""


def test_ranks_leave_behind_what_they_stored_before_a_reset_or_other_weights(told: list[dict[str, Any]]) -> None:
    """Scheduler and ranks of an engine of several processes agree one step after the weights changed.

    What is missing is stored, and used the next time.
    """
    stored, missing, outdated = ("", ""), ("not stored", ""), ("outdated", "")
    for renamed in (told[0]["renamed"], told[1]["renamed"]):
        assert renamed["reset"] == [stored, missing, stored, stored]
    assert told[0]["renamed"]["reload"] == [stored, missing, stored, stored]
    assert told[1]["renamed"]["reload"] == [stored, outdated, missing, stored]
