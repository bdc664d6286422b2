"""Means over questions, with intervals: what `--json` writes and the table shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from blendrag.evaluate.metrics import Interval, interval, mean
from blendrag.evaluate.outcome import Outcome
from blendrag.evaluate.run import Evaluation
from blendrag.evaluate.settings import Setting


@dataclass(frozen=True)
class Summary:
    """One policy at one ratio; means over `n` questions, None where there was nothing to average.

    Attributes:
        policy, ratio: see `Setting`.
        settings: `Policy.settings()`; None for the full prefill.
        f1, em: over those questions of which a right answer is known.
        top1, same: shares of the questions.
        ttft_s: seconds to the first token, one request at a time; the median.
        ci: 95 % bootstrap intervals over the questions: of "kl", "top1" and "kl16" themselves, and of the difference
            to the full prefill, question by question, for "f1" and "em".
    """

    policy: str
    ratio: float | tuple[float, ...] | None
    settings: dict[str, Any] | None
    rows: float | None
    f1: float | None
    em: float | None
    kl: float | None
    top1: float | None
    kl16: float | None
    same: float | None
    ttft_s: float | None
    n: int
    ci: dict[str, Interval | None]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def summarise(evaluation: Evaluation) -> list[Summary]:
    """One summary for each setting, the full prefill's first."""
    plain = evaluation.outcomes[evaluation.settings[0].label]
    return [summary_of(setting, evaluation.outcomes[setting.label], plain) for setting in evaluation.settings]


def summary_of(setting: Setting, outcomes: Sequence[Outcome], plain: Sequence[Outcome]) -> Summary:
    """What one setting did.

    Args:
        plain: the full prefill's outcomes of the same questions.
    """
    means = {name: mean(values_of(outcomes, name)) for name in ("rows", "f1", "em", "kl", "top1", "kl16", "same")}
    times = values_of(outcomes, "ttft_s")
    ci = {name: interval(differences(outcomes, plain, name)) for name in ("f1", "em")}
    ci |= {name: interval(values_of(outcomes, name)) for name in ("kl", "top1", "kl16")}
    settings = setting.policy.settings() if setting.policy is not None else None
    return Summary(policy=setting.name, ratio=setting.ratio, settings=settings, n=len(outcomes), ci=ci,
                   ttft_s=median(times) if times else None, **means)


def values_of(outcomes: Sequence[Outcome], name: str) -> list[float]:
    """One measure of each question that has it."""
    return [float(value) for outcome in outcomes if (value := getattr(outcome, name)) is not None]


def differences(outcomes: Sequence[Outcome], others: Sequence[Outcome], name: str) -> list[float]:
    """One measure less that of the others, question by question."""
    pairs = zip(values_of(outcomes, name), values_of(others, name), strict=True)
    return [mine - theirs for mine, theirs in pairs]
