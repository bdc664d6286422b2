"""What a policy's audits lead to: it stays as asked, recomputes more, or is not used."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from blendrag.guard.bounds import Values, bounds, exceeds, falls_below
from blendrag.guard.settings import QualityGuard
from blendrag.policies import Policy

LARGEST = 10
"""An audit counts as this many times `max_kl` at most: bounds need an end of the scale, one outlier proves little."""

Told = tuple[float | None, float, float]
"""A mean, None of nothing, and its lower and upper bound."""


class Level(StrEnum):
    """What requests get; also what their statistics say."""

    AS_ASKED = "as asked"
    RAISED = "ratio raised"
    OFF = "blending off"


class Rung:
    """The audits of one policy, and the verdict on it.

    A verdict falls when a bound is past the threshold, and the audits that led to it count for no other: what stands
    at the threshold keeps the verdict that it has.

    Attributes:
        good: the verdict; without audits it is good.
    """

    def __init__(self, policy: Policy, guard: QualityGuard) -> None:
        self.policy = policy
        self.good = True
        self._guard = guard
        self._window: deque[tuple[float, bool]] = deque(maxlen=guard.window)
        self._told: tuple[Told, Told] | None = None
        self._evidence: deque[tuple[float, bool]] = deque(maxlen=guard.window)

    def add(self, kl: float, same: bool) -> bool:
        """Takes an audit; whether the verdict changed.

        Args:
            kl: of the first token's distributions, in nats.
            same: both have the same likeliest token.
        """
        scaled = min(kl / (LARGEST * self._guard.max_kl), 1.0) if kl == kl else 1.0
        self._told = None
        self._window.append((scaled, same))
        self._evidence.append((scaled, same))
        verdict = self._verdict()
        if verdict is None:
            return False
        changed, self.good = verdict != self.good, verdict
        if changed:
            self._window = self._evidence.copy()  # what is told is what the verdict rests on
        self._evidence.clear()
        return changed

    @property
    def samples(self) -> int:
        """Audits in the window."""
        return len(self._window)

    def kl(self) -> Told:
        """Mean KL in nats, None without audits; its lower and upper bound."""
        return self._tell()[0]

    def top1(self) -> Told:
        """Share of equal likeliest tokens, None without audits; its lower and upper bound."""
        return self._tell()[1]

    def _tell(self) -> tuple[Told, Told]:
        """Both, kept until the next audit: bounds take milliseconds, and are asked for by worker, metrics and log."""
        if self._told is None:
            kls, same = _columns(self._window)
            self._told = (_mean(kls, self._guard.confidence, LARGEST * self._guard.max_kl),
                          _mean(same, self._guard.confidence, 1.0))
        return self._told

    def _verdict(self) -> bool | None:
        """Whether the policy is good; None where the evidence allows both."""
        kls, same = _columns(self._evidence)
        given = self._guard.confidence, self._guard.window
        least = self._guard.min_top1
        if exceeds(kls, 1 / LARGEST, *given) or (least is not None and falls_below(same, least, *given)):
            return False
        if falls_below(kls, 1 / LARGEST, *given) and (least is None or exceeds(same, least, *given)):
            return True
        return None


class Ladder:
    """One policy's rungs: as asked, with twice the ratio where that makes sense, and off.

    While requests get something else, the policy as asked is still audited, and so its recovery is seen.
    """

    def __init__(self, policy: Policy, guard: QualityGuard) -> None:
        self.asked = Rung(policy, guard)
        self._guard = guard
        higher = policy.stronger()
        self._raised = Rung(higher, guard) if higher is not None else None

    @property
    def level(self) -> Level:
        """What requests get."""
        if self.asked.good:
            return Level.AS_ASKED
        return Level.RAISED if self._raised is not None and self._raised.good else Level.OFF

    @property
    def policy(self) -> Policy | None:
        """What blends requests now; None: nothing."""
        rung = {Level.AS_ASKED: self.asked, Level.RAISED: self._raised, Level.OFF: None}[self.level]
        return rung.policy if rung is not None else None

    @property
    def reasons(self) -> list[Rung]:
        """The rungs whose verdicts make the level what it is."""
        return self._watched() if self.level is Level.OFF else [self.asked]

    @property
    def watched(self) -> list[Policy]:
        """The policies that an audit compares with a full prefill."""
        return [rung.policy for rung in self._watched()]

    def add(self, policies: Sequence[Policy], kls: Sequence[float], same: Sequence[bool]) -> bool:
        """Takes an audit of the policies that were watched when it was asked for; whether the level changed."""
        before = self.level
        for policy, kl, equal in zip(policies, kls, same, strict=True):
            for rung in self._watched():
                if rung.policy == policy and rung.add(kl, equal) and rung is self.asked and self._raised is not None:
                    self._raised = Rung(self._raised.policy, self._guard)  # what it was then says nothing of now
        return self.level is not before

    def _watched(self) -> list[Rung]:
        return [self.asked] if self.asked.good or self._raised is None else [self.asked, self._raised]


def _mean(values: Values, confidence: float, scale: float) -> Told:
    low, high = bounds(values, confidence)
    return (float(values.mean()) * scale if len(values) else None), low * scale, high * scale


def _columns(audits: deque[tuple[float, bool]]) -> tuple[Values, Values]:
    found = np.array(audits, np.float64).reshape(-1, 2)
    return found[:, 0], found[:, 1]
