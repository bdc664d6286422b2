"""How sure one can be of a mean over a few questions."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log

import numpy as np
from scipy.stats import binomtest

from blendrag.evaluate.metrics import Interval

CONFIDENCE = 0.95
"""How sure it has to be that KL and agreement are as they should be."""

_RESAMPLES = 2000


def kl_interval(values: Sequence[float]) -> Interval:
    """Bootstrap-t interval of the mean of at least two values that are not negative; always the same for the same.

    Each end alone is passed with a probability of about 1 - `CONFIDENCE`.  The percentile interval, which is narrower,
    is no proof: a few questions have most of the divergence, and where the sample has none of them both its mean and
    its spread are too small.  Of exponentially distributed values, the mean is above the upper end of the percentile
    interval of 5, 15, 30 values in 22, 12, 10 of 100 cases, and above that of this one in 10, 7, 7; of log-normal ones
    with a standard deviation of 1.6 times the mean in 14, 12, 11.
    """
    x = np.asarray(values, np.float64)
    mean, error = x.mean(), x.std(ddof=1) / len(x) ** 0.5
    if error == 0:
        return float(mean), float(mean)
    picked = x[np.random.default_rng(0).integers(0, len(x), (_RESAMPLES, len(x)))]
    off, spread = picked.mean(1) - mean, picked.std(1, ddof=1) / len(x) ** 0.5
    with np.errstate(divide="ignore", invalid="ignore"):
        # A resample of one value says nothing of the spread: it may be as far off as it likes.
        t = np.nan_to_num(off / spread, nan=0.0, posinf=np.inf, neginf=-np.inf)
    low, high = np.quantile(t, [1 - CONFIDENCE, CONFIDENCE], method="nearest")
    return max(0.0, float(mean - high * error)), float(mean - low * error)


def share_proven(count: int, of: int, least: float) -> bool:
    """Whether a share is at least `least`, after `count` of so many (the exact test of a binomial distribution)."""
    if least <= 0:
        return True
    return bool(binomtest(count, of, least, alternative="greater").pvalue <= 1 - CONFIDENCE)


def fewest_for(least: float) -> int:
    """How many questions can prove a share of at least `least`, below 1, if none fails."""
    return ceil(log(1 - CONFIDENCE) / log(least))
