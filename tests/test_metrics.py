"""What vLLM's metrics and log say of requests and of the quality guard."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from blendrag.runtime.metrics import ConnectorMetrics, ConnectorStats
from blendrag.runtime.planning.request_counts import OUTCOMES, RequestCounts, outcome
from blendrag.stats import NOT_WORTH, PREFIX_CACHED, BlendStats, ChunkStats
from tests.test_guard_audits import BAD, audits, begun, plan, request, results_of, step


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> ConnectorMetrics:
    def gauge(**arguments: Any) -> Gauge:
        return Gauge(registry=registry, **arguments)

    def counter(**arguments: Any) -> Counter:
        return Counter(registry=registry, **arguments)

    return ConnectorMetrics(SimpleNamespace(kv_transfer_config=None),  # type: ignore[arg-type]
                            {Gauge: gauge, Counter: counter, Histogram: None},
                            ["model_name", "engine"], {0: ["m", "0"]}, guard=True)


def test_metrics_tell_the_state_of_each_policy_and_count_audits_once(
        registry: CollectorRegistry, metrics: ConnectorMetrics) -> None:
    queue = audits(queue=100)
    for many in (3, 4):
        for _ in range(many):
            queue.admit(request(1), plan(10))
        queue.done([results_of(audit, BAD) for audit in begun(queue, step())])
        stats = ConnectorStats({"policies": queue.news("metrics")})
        assert not stats.is_empty()
        metrics.observe(stats.data)
        metrics.observe(stats.data)
    text = generate_latest(registry).decode()
    labels = '{engine="0",model_name="m",policy="query"}'
    assert f"blendrag_quality_audited_total{labels} 7.0" in text
    assert f"blendrag_quality_level{labels} 2.0" in text
    assert f"blendrag_quality_top1{labels} 0.0" in text
    assert stats.reduce()["top1 of query"] == 0
    metrics.observe({"policies": []})
    assert b'policy="query"' not in generate_latest(registry), "the guard has forgotten it"


@pytest.mark.parametrize(("stats", "expected"), [
    (BlendStats(chunks=[ChunkStats(0, 9, reused=True), ChunkStats(9, 9, reason="not stored")]), "blended"),
    (BlendStats(continued=True, chunks=[ChunkStats(0, 9, reason=PREFIX_CACHED)]), "continued"),
    (BlendStats(continued=True), "continued"),
    (BlendStats(continued=True, chunks=[ChunkStats(0, 9, reused=True)]), "blended"),
    (BlendStats(chunks=[ChunkStats(0, 9, reason=PREFIX_CACHED)]), "prefix cached"),
    (BlendStats(chunks=[ChunkStats(0, 9, reason=NOT_WORTH), ChunkStats(9, 9, reason=PREFIX_CACHED)]),
     "not worth a pass"),
    (BlendStats(chunks=[ChunkStats(0, 9, reason="not stored")]), "nothing stored"),
    (BlendStats(failure="OSError", chunks=[ChunkStats(0, 9, reason="pass failed")]), "failed"),
])
def test_each_request_has_one_outcome(stats: BlendStats, expected: str) -> None:
    assert outcome(stats) == expected
    assert expected in OUTCOMES


def test_requests_and_their_tokens_are_counted_once(registry: CollectorRegistry, metrics: ConnectorMetrics) -> None:
    counts = RequestCounts()
    assert counts.news() is None
    counts.add(BlendStats(prompt_tokens=100, reused_tokens=70, prefix_cached_tokens=10,
                          chunks=[ChunkStats(0, 80, reused=True)]))
    first = ConnectorStats(counts.news() or {})
    counts.add(BlendStats(prompt_tokens=50, chunks=[ChunkStats(0, 9, reason=NOT_WORTH)]))
    both = first.aggregate(ConnectorStats(counts.news() or {}))
    assert counts.news() is None
    assert both.reduce() == {"blended": 1, "not worth a pass": 1}
    metrics.observe(both.data)
    text = generate_latest(registry).decode()
    for metric, label, count in (("requests", 'outcome="blended"', 1), ("requests", 'outcome="not worth a pass"', 1),
                                 ("tokens", 'source="reused"', 70), ("tokens", 'source="prefix cache"', 10),
                                 ("tokens", 'source="computed"', 70)):
        assert f'blendrag_{metric}_total{{engine="0",model_name="m",{label}}} {count}.0' in text
    both.reset()
    assert both.is_empty()


def test_the_tokens_of_a_request_add_up_where_a_pass_replaces_what_was_cached() -> None:
    counts = RequestCounts()
    counts.add(BlendStats(prompt_tokens=100, reused_tokens=80, prefix_cached_tokens=64,
                          chunks=[ChunkStats(0, 90, reused=True)]))
    news = counts.news()
    assert news is not None
    assert news["tokens"] == {"reused": 80, "prefix cache": 20, "computed": 0}
