"""Figures of a load: quantiles, goodput, where the prompt tokens came from, and whether the speed lasts."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from blendrag.bench.load.clients import Reply, Usage
from blendrag.bench.load.run import Load, Run
from blendrag.errors import BlendError, ConfigError

BATCH = 20
"""Requests that are taken together to see whether the speed lasts."""


@dataclass(frozen=True)
class Quantiles:
    """Of times, in milliseconds: 50th, 95th and 99th percentile (interpolated), and the largest."""

    p50: float
    p95: float
    p99: float
    longest: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Quantiles | None:
        """None where there are no values."""
        values = [1e3 * value for value in seconds]
        if not values:
            return None
        p50, p95, p99 = (float(value) for value in np.percentile(values, [50, 95, 99]))
        return cls(p50, p95, p99, max(values))


@dataclass(frozen=True)
class Goal:
    """What a good request meets: milliseconds to the first token and for each output token; None: any time is good."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    @classmethod
    def parse(cls, goals: Iterable[str]) -> Goal:
        """From "ttft:500" and "tpot:50", also in one text with a space between.

        Raises:
            ConfigError: text of another form.
        """
        limits: dict[str, float] = {}
        for goal in " ".join(goals).split():
            name, _, value = goal.partition(":")
            try:
                limits[name] = float(value)
            except ValueError:
                limits[name] = 0.0
            if name not in ("ttft", "tpot") or not limits[name] > 0:
                raise ConfigError(f"{goal!r} is no goal: write ttft:MS or tpot:MS with a number of milliseconds")
        return cls(limits.get("ttft"), limits.get("tpot"))

    def met(self, reply: Reply) -> bool:
        """Whether a request is good; one that failed is not."""
        return not reply.failure and not (
            (self.ttft_ms is not None and 1e3 * reply.first_token_s > self.ttft_ms)
            or (self.tpot_ms is not None and 1e3 * (reply.token_s or 0) > self.tpot_ms))


@dataclass(frozen=True)
class Ledger:
    """Where the prompt tokens of requests came from.

    Attributes:
        prompt: all of them.
        computed: computed by vLLM or in blend passes.
        cached: held by vLLM's prefix cache.
        reused: from stored chunks, as they are.  None where the server does not count them; they are in `cached` then.
    """

    prompt: int
    computed: int
    cached: int
    reused: int | None

    def __post_init__(self) -> None:
        """Raises BlendError where the sources do not add up to the total."""
        sources = self.computed, self.cached, self.reused or 0
        if min(sources) < 0 or sum(sources) != self.prompt:
            raise BlendError(f"{self.prompt} prompt tokens, of which {self.computed} were computed, {self.cached} in "
                             f"the prefix cache and {self.reused} reused, do not add up: measure without other traffic "
                             "on the server, or report it")

    @classmethod
    def of(cls, usages: Sequence[Usage], reused: int | None = None) -> Ledger:
        """The ledger of finished requests.

        Args:
            reused: their total, where the usages do not say it.
        """
        each = [usage.reused for usage in usages if usage.reused is not None]
        if len(each) == len(usages):
            reused = sum(each)
        prompt, kept = sum(usage.prompt for usage in usages), sum(usage.cached for usage in usages)
        return cls(prompt, prompt - kept, kept - (reused or 0), reused)


@dataclass(frozen=True)
class Figures:
    """One arm under one load.

    Attributes:
        arm: "plain" or "blended".
        load: how requests came; `rate` where they came at one.
        requests, failed: how many; of failed ones nothing else is counted.
        failure: why the first one failed.
        throughput: answers a second.
        goodput: answers a second that meet the goal.
        ttft, tpot: time to the first token, time per output token.
        gaps: times between tokens of the decoding streams.
        probes: time to the first token of the probes.
        rows: mean share of a full prefill's rows that was computed; None where unknown.
        batches_ms: median time to the first token of each 20 requests in turn, the last batch may be shorter.
        slowdown: the same of the last 20 requests / of the first 20; None for fewer than 40.
    """

    arm: str
    load: str
    rate: float | None
    requests: int
    failed: int
    failure: str
    throughput: float
    goodput: float
    ttft: Quantiles | None
    tpot: Quantiles | None
    gaps: Quantiles | None
    probes: Quantiles | None
    ledger: Ledger
    rows: float | None
    batches_ms: Sequence[float]
    slowdown: float | None

    @classmethod
    def of(cls, arm: str, load: Load, run: Run, goal: Goal) -> Figures:
        """What a run amounts to."""
        replies = [reply for reply in run.replies if not reply.failure]
        failures = [reply.failure for reply in (*run.replies, *run.probes) if reply.failure]
        usages = [reply.usage for reply in replies if reply.usage]
        firsts = [reply.first_token_s for reply in replies]
        rows = [usage.rows for usage in usages if usage.rows is not None]
        return cls(
            arm, load.label, load.rate, len(run.replies), len(run.replies) - len(replies),
            failures[0] if failures else "", len(replies) / run.seconds,
            sum(map(goal.met, replies)) / run.seconds, Quantiles.of(firsts),
            Quantiles.of(reply.token_s for reply in replies if reply.token_s is not None), Quantiles.of(run.gaps),
            Quantiles.of(reply.first_token_s for reply in run.probes if not reply.failure),
            Ledger.of(usages, None if failures else run.reused), statistics.fmean(rows) if rows else None,
            [1e3 * statistics.median(firsts[at : at + BATCH]) for at in range(0, len(firsts), BATCH)],
            slowdown(firsts))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def slowdown(seconds: Sequence[float]) -> float | None:
    """Median of the last 20 values / of the first 20; None for fewer than 40."""
    if len(seconds) < 2 * BATCH:
        return None
    return statistics.median(seconds[-BATCH:]) / statistics.median(seconds[:BATCH])
