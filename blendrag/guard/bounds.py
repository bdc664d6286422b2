"""How sure one can be of a mean, looking again after every sample.

An interval for a fixed number of samples (a bootstrap's, Student's, Wilson's) is wrong more and more often when it is
looked at after each of them, and a KL divergence is nowhere near normally distributed.  These bounds make no assumption
but that values lie in [0, 1], and hold at all times together: "betting" (Waudby-Smith and Ramdas, JRSS B 2024, arXiv
2010.09686).  Whoever bets on each value against a mean that is right makes the c-fold of his money with a probability
of at most 1/c, however long he plays (Ville's inequality).  A mean against which somebody gets rich is wrong.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]

_STAKES = 1 / (1 + np.exp(-np.linspace(-4.5, 4.5, 16)))
"""Shares of their money that the gamblers stake each time, about .01 to .99: one of them will have been about right."""

_EVERY = 10
"""A new table opens after so many values: the past of those at the first one keeps them from seeing a change soon."""

_STEPS = 20
"""Bisections: to a millionth of the range."""


def exceeds(values: Values, mean: float, confidence: float, window: int) -> bool:
    """Whether values, in [0, 1], have not had a mean of `mean` or less all the time, as far as one can be sure.

    Unlike `bounds` it soon sees a change, whatever was before.  If asked after every value it is wrong at any time with
    a probability of (1 - confidence) / 2 at most, up to `window` values.
    """
    return bool(_log_wealth(values, mean, window) >= _enough(confidence))


def falls_below(values: Values, mean: float, confidence: float, window: int) -> bool:
    """Whether values, in [0, 1], have not had a mean of `mean` or more all the time; see `exceeds`."""
    return exceeds(1 - values, 1 - mean, confidence, window)


def bounds(values: Values, confidence: float) -> tuple[float, float]:
    """Lower and upper bound of the mean of values in [0, 1]; both hold together with this confidence."""
    return _lower(values, confidence), 1 - _lower(1 - values, confidence)


def _lower(values: Values, confidence: float) -> float:
    low, high = 0.0, 1.0  # wealth falls as the mean that is bet against grows
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if _log_wealth(values, middle) >= _enough(confidence):
            low = middle
        else:
            high = middle
    return low


def _enough(confidence: float) -> float:
    return float(np.log(2 / (1 - confidence)))


def _log_wealth(values: Values, mean: float, window: int | None = None) -> float:
    """The logarithm of what becomes of 1, bet on values being above `mean`, in (0, 1).

    Who stakes a share s of his money on a value x has 1 - s + s x / mean times as much afterwards.

    Args:
        window: half of the money is at a table that plays from the first value on, the rest is spread over those that
            open until then.  None: all is at the first one.
    """
    gains = np.log1p(_STAKES * (values[:, None] / mean - 1))
    tables = np.arange(0, window or 1, _EVERY)
    money = np.full(len(tables), 0.5 / max(1, len(tables) - 1))
    money[0] = 1 - money[1:].sum()
    made = np.zeros((len(values) + 1, len(_STAKES)))  # from each value on
    made[:-1] = gains[::-1].cumsum(0)[::-1]
    made = made[tables.clip(max=len(values))]
    return float(np.logaddexp.reduce(np.log(money / len(_STAKES))[:, None] + made, axis=None))
