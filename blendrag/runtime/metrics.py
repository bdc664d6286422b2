"""blendrag in vLLM's own statistics: lines of its log, and metrics named blendrag_*."""

from __future__ import annotations

from collections import Counter as Counts
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from blendrag.runtime.quality_metrics import QualityMetrics

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PREFIX = "blendrag_"
_COUNTERS = {
    "requests": ("outcome", "Requests with documents, and those that continue such, by what became of them."),
    "tokens": ("source", "Their prompt tokens: reused of stored chunks, in vLLM's prefix cache, or computed."),
}


class ConnectorStats(KVConnectorStats):  # type: ignore[misc]  # vLLM's classes have no types here
    """What has happened since the last one; each part may be missing.

    `{"requests": {outcome: count}, "tokens": {source: count}}` of `RequestCounts`, and the state of the quality guard,
    `{"policies": [Quality as a mapping, ...]}`.
    """

    data: dict[str, Any]

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Counts add up, of states the later one stands."""
        data = {**self.data, **other.data}
        for name in _COUNTERS:
            if name in data:
                data[name] = dict(Counts(self.data.get(name, {})) + Counts(other.data.get(name, {})))
        return ConnectorStats(data)

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's log says every few seconds in which there was something."""
        line: dict[str, int | float] = dict(self.data.get("requests", {}))
        for quality in self.data.get("policies", ()):
            for name in ("kl", "top1"):
                if quality[name] is not None:
                    line[f"{name} of {quality['policy']}"] = round(quality[name], 4)
        return line

    def reset(self) -> None:
        """Forgets it all."""
        self.data = {}

    def is_empty(self) -> bool:
        """Whether there is nothing to say."""
        return not any(self.data.values())


class ConnectorMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Prometheus metrics of requests, and of the quality guard where there is one.

    Args:
        guard: there is one.
    """

    def __init__(self, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str],
                 per_engine_labelvalues: dict[int, list[object]], guard: bool) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        _forget_earlier()
        self._counters = {name: metric_types[Counter](name=f"{PREFIX}{name}", documentation=text,
                                                      labelnames=[*labelnames, label])
                          for name, (label, text) in _COUNTERS.items()}
        self._quality = QualityMetrics(metric_types, labelnames, per_engine_labelvalues) if guard else None

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Takes the data of a `ConnectorStats`."""
        for name, counter in self._counters.items():
            for label, count in transfer_stats_data.get(name, {}).items():
                counter.labels(*self.per_engine_labelvalues[engine_idx], label).inc(count)
        if self._quality is not None and "policies" in transfer_stats_data:
            self._quality.observe(transfer_stats_data["policies"], engine_idx)


def _forget_earlier() -> None:
    """Makes room for the metrics of a second engine in this process, as vLLM does for its own."""
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith(PREFIX):
            REGISTRY.unregister(collector)
