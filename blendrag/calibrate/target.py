"""What blended answers have to be like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from statistics import fmean

from blendrag.calibrate.measure import Answered
from blendrag.calibrate.proof import kl_interval, share_proven
from blendrag.errors import ConfigError


@dataclass(frozen=True)
class Target:
    """Limits, all of which have to be kept; at least one is set.

    Attributes:
        max_kl: mean KL(full || blended) of the first token, in nats.
        min_top1: share of questions on which both expect the same first token.
        min_f1: share of the full prefill's mean F1.

    Raises:
        ConfigError: no limit, or one out of range.
    """

    max_kl: float | None = None
    min_top1: float | None = None
    min_f1: float | None = None

    def __post_init__(self) -> None:
        if not self.to_dict():
            raise ConfigError("the target has no limit: give max_kl, min_top1 or min_f1")
        if self.max_kl is not None and not (self.max_kl > 0 and isfinite(self.max_kl)):
            raise ConfigError(f"max_kl is {self.max_kl:g}: give it more than 0 nats, such as 0.1")
        for name, share in (("min_top1", self.min_top1), ("min_f1", self.min_f1)):
            if share is not None and not 0 < share <= 1:
                raise ConfigError(f"{name} is {share:g}: it is a share, give it more than 0 and at most 1")
        if self.min_top1 == 1:
            raise ConfigError("min_top1 is 1, which no number of questions can prove: give it 0.9 for instance")

    def met_by(self, blended: Sequence[Answered], full: Sequence[Answered]) -> bool:
        """Whether the means keep the limits, over the same questions answered both ways."""
        return not (self._breaks_f1(blended, full)
                    or (self.max_kl is not None and not fmean(a.kl for a in blended) <= self.max_kl)
                    or (self.min_top1 is not None and fmean(a.top1 for a in blended) < self.min_top1))

    def proven_by(self, blended: Sequence[Answered], full: Sequence[Answered]) -> bool:
        """Whether one can be sure (`proof.CONFIDENCE`) that KL and agreement keep their limits on all such questions.

        F1 goes by its mean: an interval as narrow as one per cent would take thousands of questions.
        """
        return not (self._breaks_f1(blended, full)
                    or (self.max_kl is not None and not kl_interval([a.kl for a in blended])[1] <= self.max_kl)
                    or (self.min_top1 is not None and not share_proven(
                        sum(a.top1 for a in blended), len(blended), self.min_top1)))

    def to_dict(self) -> dict[str, float]:
        """The limits that are set."""
        return {name: limit for name, limit in asdict(self).items() if limit is not None}

    def __str__(self) -> str:
        words = {"max_kl": "KL <= {:g}", "min_top1": "top-1 agreement >= {:.0%}", "min_f1": "F1 >= {:.0%} of plain's"}
        return " and ".join(words[name].format(limit) for name, limit in self.to_dict().items())

    def _breaks_f1(self, blended: Sequence[Answered], full: Sequence[Answered]) -> bool:
        if self.min_f1 is None:
            return False
        ours, theirs = (fmean(a.f1 for a in answered if a.f1 is not None) for answered in (blended, full))
        return ours < self.min_f1 * theirs
