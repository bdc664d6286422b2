"""Which requests are audited, and when."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np

from blendrag import QualityGuard
from blendrag.policies import Full, Policy, Query
from blendrag.runtime.messages import Audit, AuditResult
from blendrag.runtime.planning.audits import Audits
from blendrag.runtime.planning.placing import Plan
from blendrag.runtime.planning.step_load import StepLoad
from blendrag.stats import BlendStats

NUMBERS = count()
STEP = 250
GOOD, BAD = AuditResult([0.01], [True]), AuditResult([5.0], [False])


def request(tokens: int = 0) -> Any:
    return SimpleNamespace(num_output_tokens=tokens, is_finished=lambda: False)


def plan(length: int = 100, policy: Policy | None = None) -> Plan:
    """Of a prompt that no other has."""
    return Plan(policy or Query(), BlendStats(), np.arange(length, dtype=np.int64) + next(NUMBERS))


def step(*tokens: int, new: bool = False) -> StepLoad:
    """A step with so many tokens for each request."""
    return StepLoad.of(SimpleNamespace(num_scheduled_tokens=dict(enumerate(tokens)),
                                       scheduled_new_reqs=[None] if new else [],
                                       total_num_scheduled_tokens=sum(tokens)), passes=False)


def audits(**guard: Any) -> Audits:
    return Audits(QualityGuard(**{"share": 1, **guard}), step_tokens=STEP)


def results_of(audit: Audit, each: AuditResult) -> AuditResult:
    return AuditResult(each.kl * len(audit.policies), each.same * len(audit.policies))


def begun(queue: Audits, where: Any) -> list[Audit]:
    """The audits that begin in a step."""
    return queue.take(where)[0]


def lengths(taken: list[Any]) -> list[int]:
    return [len(audit.token_ids) for audit in taken]


def test_an_audit_waits_for_its_requests_first_token_and_for_a_step_without_prompts() -> None:
    queue = audits()
    asked = request()
    queue.admit(asked, plan())
    assert not queue.pending
    assert queue.take(step()) == ([], 0)
    asked.num_output_tokens = 1
    assert queue.pending
    assert queue.take(step(1, 1, new=True)) == queue.take(step(200, 1)) == ([], 0)
    [audit] = begun(queue, step(1, 1))
    assert (audit.asked, audit.policies) == (Query(), [Query()])
    assert queue.take(step()) == ([], STEP), "the one is under way"
    queue.done([GOOD])
    assert queue.news("worker") == queue.news("metrics") != []
    assert not queue.pending
    assert queue.news("worker") is None


def test_a_step_takes_as_many_rows_as_vllm_would_of_prompts_and_a_long_audit_takes_several_steps() -> None:
    queue = audits()
    for length in (50, 70, 10, 300, 50):
        queue.admit(request(1), plan(length))
    chosen, rows = queue.take(step(1))
    assert (lengths(chosen), rows) == ([50, 70], STEP)
    assert queue.take(step(1)) == ([], STEP), "until both are done"
    queue.done([GOOD])
    assert lengths(begun(queue, step(1))) == [10]
    queue.done([GOOD, GOOD])
    chosen, rows = queue.take(step())
    assert (lengths(chosen), rows) == ([300], STEP), "nor does an idle step take more: somebody may come"
    queue.done([])
    assert queue.take(step(1)) == ([], STEP)
    queue.done([GOOD])
    assert lengths(begun(queue, step(1))) == [50]
    assert [quality.audited for quality in queue.monitor.quality()] == [4]


def test_where_every_step_computes_prompts_one_is_done_from_time_to_time() -> None:
    queue = audits(queue=4)
    for _ in range(4):
        queue.admit(request(1), plan(300))
    when = []
    for number in range(600):
        chosen, rows = queue.take(step(200, 1, new=True))
        if rows:
            assert (lengths(chosen), rows) == ([300], STEP)
            queue.done([GOOD])
            when.append(number)
    assert len(when) == 2
    assert when[1] - when[0] > 200
    assert lengths(begun(queue, step())) == [300], "an idle step needs no patience"


def test_a_client_that_names_many_policies_does_not_make_the_guard_forget_the_default() -> None:
    queue = audits(max_kl=0.3, queue=100)
    queue.monitor.default = Query()
    for _ in range(20):
        queue.admit(request(1), plan(10))
        queue.done([results_of(audit, BAD) for audit in begun(queue, step())])
    assert [found.level for found in queue.monitor.quality()] == ["blending off"]
    for number in range(200):
        queue.admit(request(1), plan(10, policy=Query(ratio=(number + 1) / 1001)))
        queue.done([results_of(audit, GOOD) for audit in begun(queue, step())])
    quality = {found.policy: found for found in queue.monitor.quality()}
    assert len(quality) == 64
    assert (quality["query"].audited, quality["query"].level) == (20, "blending off")


def test_what_does_not_fit_into_the_queue_or_cannot_be_compared_is_counted() -> None:
    queue = audits(queue=3)
    for _ in range(5):
        queue.admit(request(1), plan(40))
    assert len(begun(queue, step())) == 3
    queue.done([GOOD, AuditResult(), AuditResult(failure="no memory")])
    [told] = queue.monitor.quality()
    assert (told.audited, told.dropped, told.failed) == (1, 3, 1)


def test_a_share_of_the_requests_is_audited() -> None:
    queue = audits(share=0.25, queue=10_000)
    for _ in range(2000):
        queue.admit(request(1), plan(1))
    queue._step_tokens = 10_000
    assert 400 < len(begun(queue, step())) < 600


def test_several_samples_of_a_prompt_are_audited_once() -> None:
    queue = audits()
    sampled = plan()
    for _ in range(4):
        queue.admit(request(1), sampled)
    assert len(begun(queue, step())) == 1
    queue.admit(request(1), sampled)
    queue.done([GOOD])
    assert begun(queue, step()) == []
    queue.admit(request(1), plan(policy=Query(ratio=0.3)))
    assert len(begun(queue, step())) == 1
    assert [told.dropped for told in queue.monitor.quality()] == [0, 0]


def test_a_full_prefill_is_not_compared_with_itself() -> None:
    queue = audits()
    assert queue.admit(request(1), plan(policy=Full())) is None
    assert not queue.pending


def test_requests_follow_the_ladder_and_both_rungs_are_watched() -> None:
    queue = audits(max_kl=0.3, queue=100)
    ladder = queue.admit(request(1), plan(10))
    assert ladder is not None
    for _ in range(20):
        queue.done([results_of(audit, BAD) for audit in begun(queue, step())])
        queue.admit(request(1), plan(10))
    assert ladder.policy is None
    [audit] = begun(queue, step())
    assert audit.policies == [Query(), Query(ratio=0.3)]
