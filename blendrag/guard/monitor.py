"""All policies that an engine's requests name, each with its ladder."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from blendrag.guard.ladder import Ladder, Level, Rung
from blendrag.guard.settings import QualityGuard
from blendrag.policies import Policy

logger = logging.getLogger(__name__)

_POLICIES = 64
"""Clients of a server can name any number of policies.  Of more than that, the one that was asked for longest ago is
forgotten, one that is as asked before one that is not, and never the default."""


@dataclass(frozen=True)
class Quality:
    """How good the answers of one policy are, by the latest audits.

    Attributes:
        policy: its name, with the settings that are not its defaults.
        level: what requests get that ask for it: "as asked", "ratio raised" (twice as much is recomputed) or "blending
            off" (they are prefilled in full).  What follows is of the policy as asked.
        samples: audits that the means are of.
        kl, kl_low, kl_high: mean KL(full || blended) of the first token in nats, and its bounds; each audit counts
            as ten times `max_kl` at most.  None without samples.
        top1, top1_low, top1_high: share of requests whose likeliest first token is the full prefill's, and its bounds.
        audited, dropped, failed: audits since the engine started: done; not done, as too many waited or a chunk was no
            longer stored; ended by an error.
    """

    policy: str
    level: str
    samples: int
    kl: float | None
    kl_low: float
    kl_high: float
    top1: float | None
    top1_low: float
    top1_high: float
    audited: int
    dropped: int
    failed: int


class _Watched:
    """A policy's ladder, and what became of its audits."""

    def __init__(self, policy: Policy, guard: QualityGuard) -> None:
        self.ladder = Ladder(policy, guard)
        self.audited = self.dropped = self.failed = 0


class Monitor:
    """Tells what requests get, and what the audits of it found.

    Attributes:
        default: the policy of requests that name none.
    """

    def __init__(self, guard: QualityGuard) -> None:
        self.default: Policy | None = None
        self._guard = guard
        self._policies: OrderedDict[Policy, _Watched] = OrderedDict()

    def ladder(self, policy: Policy) -> Ladder:
        """Where requests that ask for a policy stand."""
        return self._of(policy).ladder

    def add(self, asked: Policy, policies: Sequence[Policy], kls: Sequence[float], same: Sequence[bool]) -> None:
        """Takes an audit of requests that ask for a policy; see `Ladder.add`."""
        watched = self._of(asked)
        watched.audited += 1
        if watched.ladder.add(policies, kls, same):
            self._tell(asked, watched.ladder)

    def drop(self, asked: Policy) -> None:
        """Counts an audit that was not done."""
        self._of(asked).dropped += 1

    def fail(self, asked: Policy) -> None:
        """Counts an audit that ended with an error."""
        self._of(asked).failed += 1

    def quality(self) -> list[Quality]:
        """Each policy that requests have asked for."""
        told = []
        for policy, watched in self._policies.items():
            rung = watched.ladder.asked
            told.append(Quality(policy.label, watched.ladder.level.value, rung.samples, *rung.kl(), *rung.top1(),
                                watched.audited, watched.dropped, watched.failed))
        return told

    def _of(self, policy: Policy) -> _Watched:
        if policy not in self._policies and len(self._policies) >= _POLICIES:
            self._forget_one()
        watched = self._policies.setdefault(policy, _Watched(policy, self._guard))
        self._policies.move_to_end(policy)
        return watched

    def _forget_one(self) -> None:
        others = [policy for policy in self._policies if policy != self.default]
        fine = (policy for policy in others if self._policies[policy].ladder.level is Level.AS_ASKED)
        del self._policies[next(fine, others[0])]

    def _tell(self, policy: Policy, ladder: Ladder) -> None:
        logger.log(logging.INFO if ladder.level is Level.AS_ASKED else logging.WARNING,
                   "quality guard: requests with policy %s now get: %s.  %s", policy.label, ladder.level.value,
                   ".  ".join(map(self._found, ladder.reasons)))

    def _found(self, rung: Rung) -> str:
        told = (f"In {rung.samples} audits of {rung.policy.label} the mean KL of the first token is "
                f"{_spread(*rung.kl())}; {self._guard.max_kl:.3g} is allowed)")
        if self._guard.min_top1 is not None:
            told += (f", and the share whose likeliest first token is a full prefill's is "
                     f"{_spread(*rung.top1())}; {self._guard.min_top1:.3g} is asked for)")
        return told


def _spread(mean: float | None, low: float, high: float) -> str:
    return f"{'unknown' if mean is None else format(mean, '.3g')} ({low:.3g} to {high:.3g}"
