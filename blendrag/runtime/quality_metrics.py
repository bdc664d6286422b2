"""The quality guard in vLLM's own statistics: lines of its log, and metrics named blendrag_quality_*."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from blendrag.guard.ladder import Level

if TYPE_CHECKING:
    from vllm.config import VllmConfig

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


class QualityStats(KVConnectorStats):  # type: ignore[misc]  # vLLM's classes have no types here
    """`{"policies": [Quality as a mapping, ...]}`, the state at some time."""

    data: dict[str, Any]

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """The later state stands."""
        return other

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's log tells every few seconds in which there were audits."""
        told: dict[str, int | float] = {}
        for quality in self.data.get("policies", ()):
            for name in ("kl", "top1"):
                if quality[name] is not None:
                    told[f"{name} of {quality['policy']}"] = round(quality[name], 4)
        return told

    def reset(self) -> None:
        """Forgets the state."""
        self.data = {}

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.data.get("policies")


class QualityMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Prometheus metrics of each policy, with a label `policy` beside vLLM's own."""

    def __init__(self, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str],
                 per_engine_labelvalues: dict[int, list[object]]) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        _forget_earlier()
        labels = [*labelnames, "policy"]
        self._gauges = {name: metric_types[Gauge](name=f"{_PREFIX}{name}", documentation=text,
                                                  labelnames=labels, multiprocess_mode="mostrecent")
                        for name, text in _GAUGES.items()}
        self._counters = {name: metric_types[Counter](name=f"{_PREFIX}{name}", documentation=text,
                                                      labelnames=labels)
                          for name, text in _COUNTERS.items()}
        self._counted: dict[tuple[int, str, str], int] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Takes a `QualityStats`."""
        for quality in transfer_stats_data.get("policies", ()):
            policy = quality["policy"]
            labels = [*self.per_engine_labelvalues[engine_idx], policy]
            values = quality | {"level": _LEVELS.index(quality["level"])}
            for name, gauge in self._gauges.items():
                gauge.labels(*labels).set(math.nan if values[name] is None else values[name])
            for name, counter in self._counters.items():
                before = self._counted.get((engine_idx, policy, name), 0)
                counter.labels(*labels).inc(max(0, values[name] - before))
                self._counted[engine_idx, policy, name] = values[name]
        known = {quality["policy"] for quality in transfer_stats_data.get("policies", ())}
        for policy in {policy for engine, policy, _ in self._counted if engine == engine_idx} - known:
            self._forget(engine_idx, policy)

    def _forget(self, engine_idx: int, policy: str) -> None:
        for name in self._counters:
            del self._counted[engine_idx, policy, name]
        for metric in (*self._gauges.values(), *self._counters.values()):
            with suppress(AttributeError):  # Ray's metrics cannot forget
                metric.remove(*self.per_engine_labelvalues[engine_idx], policy)


def _forget_earlier() -> None:
    """Makes room for the metrics of a second engine in this process, as vLLM does for its own."""
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith(_PREFIX):
            REGISTRY.unregister(collector)
