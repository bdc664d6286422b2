"""How good an answer is, and how far one distribution is from another: pure functions."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Interval = tuple[float, float]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_FLOOR = 1e-9  # what is left to the rest of the vocabulary is known no better
_IMPOSSIBLE = np.log(np.finfo(np.float32).tiny)  # masked tokens: a KL of infinity has no mean
_RESAMPLES = 2000


@dataclass(frozen=True)
class Distribution:
    """What a model expects at one place of its answer.

    Attributes:
        ids: int64 [tokens]; the likeliest tokens, or all of them.
        logprobs: float64 [tokens]; their log-probabilities.  What they leave of 1 is the rest of the vocabulary's.
    """

    ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float64]

    @property
    def likeliest(self) -> int:
        """The likeliest token; of several the one with the smallest id."""
        return int(self.ids[self.logprobs == self.logprobs.max()].min())


def divergence(full: Distribution, other: Distribution) -> float:
    """KL(full || other) in nats.

    Tokens that both name are outcomes of their own, all others together are one outcome more.  For distributions over
    the whole vocabulary that is the exact divergence; otherwise it is a lower bound of it, as merging outcomes can
    only hide differences.
    """
    _, mine, theirs = np.intersect1d(full.ids, other.ids, return_indices=True)
    logp, logq = full.logprobs[mine], np.maximum(other.logprobs[theirs], _IMPOSSIBLE)
    possible = np.isfinite(logp)
    p = np.exp(logp[possible])
    inside = float(np.sum(p * (logp[possible] - logq[possible])))
    rest_p, rest_q = (max(_FLOOR, 1.0 - float(np.exp(log).sum())) for log in (logp, logq))
    # Rounding can bring two equal distributions to just below zero.
    return float(np.maximum(0.0, inside + rest_p * float(np.log(rest_p / rest_q))))


def normalise(text: str) -> str:
    """As SQuAD compares answers: lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def first_line(text: str) -> str:
    """The first line that is not blank: what a model that goes on talking meant to answer."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def exact_match(answer: str, references: Sequence[str]) -> float:
    """1.0 where the answer equals a reference, normalised; 0.0 elsewhere."""
    return float(any(normalise(answer) == normalise(reference) for reference in references))


def f1(answer: str, references: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over normalised words; the best of the references counts."""
    return max(_f1(normalise(answer).split(), normalise(reference).split()) for reference in references)


def _f1(answer: list[str], reference: list[str]) -> float:
    if not answer or not reference:
        return float(answer == reference)
    common = sum((Counter(answer) & Counter(reference)).values())
    return 2 * common / (len(answer) + len(reference))


def mean(values: Sequence[float]) -> float | None:
    """The arithmetic mean; None of nothing."""
    return float(np.mean(values)) if len(values) else None


def interval(values: Sequence[float], statistic: Callable[..., npt.NDArray[np.float64]] = np.mean,
             level: float = 0.95, seed: int = 0) -> Interval | None:
    """Percentile bootstrap interval of the mean (or another statistic) over questions; None of nothing.

    The interval of a paired difference is the interval of the questions' differences.

    Args:
        statistic: takes an array [resamples, questions] and `axis=1`.
        level: share of resamples inside.
        seed: the same values and seed give the same interval.
    """
    if not len(values):
        return None
    picks = np.random.default_rng(seed).integers(0, len(values), (_RESAMPLES, len(values)))
    found = statistic(np.asarray(values, np.float64)[picks], axis=1)
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
