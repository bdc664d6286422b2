"""The settings that are tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from blendrag.evaluate.settings import Setting
from blendrag.policies import CacheBlend, First, Full, NoRecompute, Policy, Query

FIRST_LOOK = 0.15
"""The ratio at which families are compared."""

RATIOS = (0.03, 0.06, 0.1, FIRST_LOOK, 0.22, 0.32, 0.45, 0.6)


@dataclass(frozen=True)
class Family:
    """Policies that differ in how much they recompute.

    Attributes:
        name: for people, unique.
        at: the policy for a share of the reused tokens, 0 to 1.
    """

    name: str
    at: Callable[[float], Policy]

    def setting(self, ratio: float) -> Setting:
        """The policy at a ratio, as something to measure."""
        return Setting(self.name, self.at(ratio))


# Shares are the layers in which attention is measured, with the mean over the question's rows; "moved" carries changes
# over (`Selective.reach`).
FAMILIES = (
    Family("query", lambda ratio: Query(ratio=ratio)),
    Family("query 33-66 %", lambda ratio: Query(ratio=ratio, layers=(0.33, 0.66), over_rows="mean")),
    Family("query 50-100 %", lambda ratio: Query(ratio=ratio, layers=(0.5, 1.0), over_rows="mean")),
    Family("query 75-100 %", lambda ratio: Query(ratio=ratio, layers=(0.75, 1.0), over_rows="mean")),
    Family("cacheblend", lambda ratio: CacheBlend(ratio=ratio)),
    Family("cacheblend, moved", lambda ratio: CacheBlend(ratio=ratio, reach=64.0)),
)

CHEAPEST = (Setting("none", NoRecompute()), Setting("first", First()), Setting("first, moved", First(reach=64.0)))
"""Settings without a ratio."""

CONTROL = Setting("full", Full())
"""Everything recomputed by a blend pass: what is left is rounding, and no target below it can be met."""
