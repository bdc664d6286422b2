"""Audits: which requests are checked, when, and what the quality guard makes of it; see `blendrag.guard`."""

from __future__ import annotations

import random
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from blendrag.guard import Monitor, QualityGuard
from blendrag.guard.ladder import Ladder
from blendrag.policies import Policy
from blendrag.runtime.messages import Audit, AuditResult
from blendrag.runtime.planning.placing import Plan
from blendrag.runtime.planning.step_load import AfterFirstToken, StepLoad

if TYPE_CHECKING:
    from vllm.v1.request import Request

_PATIENCE = 256
"""Steps on end that compute prompts before an audit is done all the same: a busy server needs its guard, too."""


class Audits:
    """The scheduler side's queue of requests to audit.

    Args:
        step_tokens: prompt tokens that vLLM computes in one step.
    """

    def __init__(self, guard: QualityGuard, step_tokens: int) -> None:
        self.monitor = Monitor(guard)
        self._guard = guard
        self._step_tokens = step_tokens
        self._random = random.Random()
        self._waiting: AfterFirstToken[tuple[Plan, Audit]] = AfterFirstToken()
        self._ready: list[Audit] = []
        self._running: list[Audit] = []
        self._steps_waited = 0
        self._untold = {"worker": False, "metrics": False}

    def admit(self, request: Request, plan: Plan) -> Ladder | None:
        """Takes a request that reuses chunks, which may be audited once it has its first token.

        Returns:
            Where requests stand that ask for its policy; None where nothing is approximate.
        """
        ladder = self.ladder(plan.policy)
        if ladder is None:
            return None
        if self._random.random() < self._guard.share and not self._has(plan):
            if len(self._waiting) + len(self._ready) >= self._guard.queue:
                self._drop(plan.policy)
            else:
                audit = Audit(plan.policy, ladder.watched, plan.ids, list(plan.placements), plan.question_start,
                              plan.fingerprint)
                self._waiting.add(request, (plan, audit))
        return ladder

    def ladder(self, policy: Policy) -> Ladder | None:
        """Where requests stand that ask for a policy; None where nothing is approximate."""
        return None if policy.recomputes_all else self.monitor.ladder(policy)

    def take(self, step: StepLoad) -> tuple[list[Audit], int]:
        """The audits to begin in a step, and the rows to compute, of them and of those that are under way.

        None where the step computes somebody's prompt; where it decodes for somebody, as many as another request's
        prompt may have in a step.  After very many steps that all compute prompts one audit is done all the same.
        """
        self._admit()
        if not self._ready and not self._running:
            self._steps_waited = 0
            return [], 0
        if step.prefills and self._steps_waited < _PATIENCE:
            self._steps_waited += 1
            return [], 0
        if not step.prefills:
            self._steps_waited = 0
        starting: list[Audit] = []
        while self._ready and (not (starting or self._running) or self._fits([*starting, self._ready[0]])):
            starting.append(self._ready.pop(0))
        self._running += starting
        return starting, self._step_tokens

    def done(self, results: list[AuditResult]) -> None:
        """Takes what the worker found in the first of the audits that are under way."""
        ended, self._running = self._running[: len(results)], self._running[len(results) :]
        for audit, result in zip(ended, results, strict=True):
            if result.failure:
                self.monitor.fail(audit.asked)
            elif not result.kl:
                self._drop(audit.asked)
            else:
                self.monitor.add(audit.asked, audit.policies, result.kl, result.same)
        self._steps_waited = 0
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
        audits = [*(audit for _, audit in self._waiting), *self._ready, *self._running]
        return any(audit.asked == plan.policy and audit.placements == plan.placements
                   and np.array_equal(audit.token_ids, plan.ids) for audit in audits)

    def _admit(self) -> None:
        self._ready.extend(audit for plan, audit in self._waiting.due() if not plan.declined)

    def _fits(self, more: list[Audit]) -> bool:
        return _cost([*self._running, *more]) <= self._step_tokens

    def _drop(self, asked: Policy) -> None:
        self.monitor.drop(asked)
        self._changed()

    def _changed(self) -> None:
        self._untold = dict.fromkeys(self._untold, True)


def _cost(audits: list[Audit]) -> int:
    """Rows of audits: a full prefill, and at most as many blended with each policy."""
    return sum(len(audit.token_ids) * (1 + len(audit.policies)) for audit in audits)
