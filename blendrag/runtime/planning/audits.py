"""Audits: which requests are checked, when, and what the quality guard makes of it; see `blendrag.guard`."""

from __future__ import annotations

import random
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from blendrag.guard import Monitor, QualityGuard
from blendrag.guard.ladder import Ladder
from blendrag.policies import Full, Policy, make_policy
from blendrag.runtime.messages import Audit, AuditResult
from blendrag.runtime.planning.idle import KEEPS_STEPPING, AfterFirstToken, idle, prefills
from blendrag.runtime.planning.placing import Plan

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_PATIENCE = 256
"""Steps that an audit waits for one in which it is in nobody's way; a busy server needs its guard, too."""


class Audits:
    """The scheduler half's queue of requests to audit.

    Args:
        step_tokens: prompt tokens that vLLM computes in one step.
    """

    def __init__(self, guard: QualityGuard, step_tokens: int) -> None:
        self.monitor = Monitor(guard)
        self._guard = guard
        self._step_tokens = step_tokens
        self._random = random.Random()
        self._waiting: AfterFirstToken[tuple[Plan, Audit]] = AfterFirstToken()
        self._ready: list[tuple[int, Audit]] = []
        self._running: list[Audit] = []
        self._steps = self._overdue_at = 0
        self._untold = {"worker": False, "metrics": False}

    def admit(self, request: Request, plan: Plan) -> Ladder | None:
        """Takes a request that reuses chunks, which may be audited once it has its first token.

        Returns:
            Where requests stand that ask for its policy; None where nothing is approximate.
        """
        if isinstance(plan.policy, Full):
            return None
        ladder = self.monitor.ladder(plan.policy)
        if self._random.random() < self._guard.share and not self._has(plan):
            if len(self._waiting) + len(self._ready) >= self._guard.queue:
                self._drop(plan.policy)
            else:
                audit = Audit(plan.policy.settings(), [policy.settings() for policy in ladder.watched], plan.ids,
                              list(plan.placements), plan.question_start)
                self._waiting.add(request, (plan, audit))
        return ladder

    def take(self, step: SchedulerOutput) -> list[Audit]:
        """The audits to do in a step; none where it computes somebody's prompt.

        In a step that decodes for somebody they take no longer than another request's prompt would.  An audit that has
        waited for very long is done all the same, alone.
        """
        self._steps += 1
        self._admit()
        if self._running or not self._ready:
            return []
        since, oldest = self._ready[0]
        if self._steps - max(since, self._overdue_at) > _PATIENCE:
            self._overdue_at = self._steps  # the next one waits as long again
            self._ready.pop(0)
            self._running = [oldest]
        elif not prefills(step):
            self._fill(step)
        return list(self._running)

    def done(self, results: list[AuditResult]) -> None:
        """Takes what the worker found in the audits that were last taken."""
        for audit, result in zip(self._running, results, strict=True):
            asked = make_policy(audit.asked)
            if result.failure:
                self.monitor.fail(asked)
            elif not result.kl:
                self._drop(asked)
            else:
                self.monitor.add(asked, list(map(make_policy, audit.policies)), result.kl, result.same)
        self._running = []
        self._changed()

    @property
    def pending(self) -> bool:
        """Whether there is anything to do now, or under way."""
        self._admit()
        return bool(self._ready or self._running or self._untold["worker"])

    def news(self, listener: str) -> list[dict[str, Any]] | None:
        """`Quality` of each policy, as mappings, for "worker" or "metrics"; None where nothing changed since last."""
        if not self._untold[listener]:
            return None
        self._untold[listener] = False
        return [asdict(quality) for quality in self.monitor.quality()]

    def _has(self, plan: Plan) -> bool:
        """Whether such a request is in the queue: several samples of one prompt are as good as one another."""
        asked = plan.policy.settings()
        audits = [*(audit for _, audit in self._waiting), *(audit for _, audit in self._ready), *self._running]
        return any(audit.asked == asked and np.array_equal(audit.token_ids, plan.ids) for audit in audits)

    def _admit(self) -> None:
        self._ready.extend((self._steps, audit) for plan, audit in self._waiting.due() if not plan.declined)

    def _fill(self, step: SchedulerOutput) -> None:
        room = self._step_tokens
        for entry in list(self._ready):
            length = len(entry[1].token_ids)
            if length <= room or (idle(step) and not (self._running and KEEPS_STEPPING)):
                self._ready.remove(entry)
                self._running.append(entry[1])
                room -= length

    def _drop(self, asked: Policy) -> None:
        self.monitor.drop(asked)
        self._changed()

    def _changed(self) -> None:
        self._untold = dict.fromkeys(self._untold, True)
