"""The quality guard's metrics, named blendrag_quality_*."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from prometheus_client import Counter, Gauge

from blendrag.guard.ladder import Level

_PREFIX = "blendrag_quality_"
_LEVELS = [level.value for level in Level]
_GAUGES = {
    "kl": "Mean KL(full || blended) of the first token in nats, in the latest audits.",
    "kl_low": "Lower confidence bound of blendrag_quality_kl.",
    "kl_high": "Upper confidence bound of blendrag_quality_kl.",
    "top1": "Share of audited requests whose likeliest first token is a full prefill's.",
    "top1_low": "Lower confidence bound of blendrag_quality_top1.",
    "top1_high": "Upper confidence bound of blendrag_quality_top1.",
    "samples": "Audits that these are of.",
    "level": "What requests with the policy get: 0 as asked, 1 ratio raised, 2 blending off.",
}
_COUNTERS = {
    "audited": "Requests that were audited.",
    "dropped": "Requests that were to be audited, when too many waited or a chunk was no longer stored.",
    "failed": "Audits that ended with an error.",
}


class QualityMetrics:
    """Prometheus metrics of each policy, with a label `policy` beside vLLM's own.

    The arguments are those of vLLM's `KVConnectorPromMetrics`.
    """

    def __init__(self, metric_types: Any, labelnames: list[str],
                 per_engine_labelvalues: dict[int, list[object]]) -> None:
        self._labels = per_engine_labelvalues
        labels = [*labelnames, "policy"]
        self._gauges = {name: metric_types[Gauge](name=f"{_PREFIX}{name}", documentation=text,
                                                  labelnames=labels, multiprocess_mode="mostrecent")
                        for name, text in _GAUGES.items()}
        self._counters = {name: metric_types[Counter](name=f"{_PREFIX}{name}", documentation=text,
                                                      labelnames=labels)
                          for name, text in _COUNTERS.items()}
        self._counted: dict[tuple[int, str, str], int] = {}

    def observe(self, policies: Sequence[dict[str, Any]], engine_idx: int) -> None:
        """Takes the state of an engine's guard: `Quality` of each policy, as mappings."""
        for quality in policies:
            policy = quality["policy"]
            labels = [*self._labels[engine_idx], policy]
            values = quality | {"level": _LEVELS.index(quality["level"])}
            for name, gauge in self._gauges.items():
                gauge.labels(*labels).set(math.nan if values[name] is None else values[name])
            for name, counter in self._counters.items():
                before = self._counted.get((engine_idx, policy, name), 0)
                counter.labels(*labels).inc(max(0, values[name] - before))
                self._counted[engine_idx, policy, name] = values[name]
        known = {quality["policy"] for quality in policies}
        for policy in {policy for engine, policy, _ in self._counted if engine == engine_idx} - known:
            self._forget(engine_idx, policy)

    def _forget(self, engine_idx: int, policy: str) -> None:
        for name in self._counters:
            del self._counted[engine_idx, policy, name]
        for metric in (*self._gauges.values(), *self._counters.values()):
            with suppress(AttributeError):  # Ray's metrics cannot forget
                metric.remove(*self._labels[engine_idx], policy)
