"""Means over questions: the points of the curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from typing import Any

from blendrag.calibrate.measure import Answered
from blendrag.calibrate.proof import kl_interval
from blendrag.evaluate.metrics import Interval, mean
from blendrag.evaluate.settings import Setting


@dataclass(frozen=True)
class Point:
    """One setting over some questions; means, see `Answered`.

    Attributes:
        n: questions.
        kl_interval: of the mean, see `proof.kl_interval`.
        meets: it keeps the target.
    """

    setting: Setting
    n: int
    rows: float
    kl: float
    kl_interval: Interval
    top1: float
    f1: float | None
    meets: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; the policy with all of its settings."""
        assert self.setting.policy is not None
        return {"name": self.setting.label, "policy": self.setting.policy.settings(), "n": self.n, "rows": self.rows,
                "kl": self.kl, "kl_interval": [end if isfinite(end) else None for end in self.kl_interval],
                "top1": self.top1, "f1": self.f1, "meets": self.meets}


def point(setting: Setting, answered: Sequence[Answered], meets: bool) -> Point:
    """The means of one setting over at least two questions."""
    kls = [a.kl for a in answered]
    return Point(setting, len(answered), fmean(a.rows for a in answered), fmean(kls), kl_interval(kls),
                 fmean(a.top1 for a in answered), mean([a.f1 for a in answered if a.f1 is not None]), meets)


def frontier(points: Sequence[Point]) -> list[Point]:
    """Those that no other point beats with fewer rows and less KL, the cheapest first."""
    found: list[Point] = []
    for one in sorted(points, key=lambda p: (p.rows, p.kl)):
        if not found or one.kl < found[-1].kl:
            found.append(one)
    return found
