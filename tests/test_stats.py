"""Statistics add up, and survive the way between processes."""

from __future__ import annotations

import json

from blendrag import BlendStats, ChunkStats, EngineStats

REQUEST = BlendStats(policy="query", prompt_tokens=100, reused_tokens=40, recomputed_tokens=10, chunks=[
    ChunkStats(0, 20, reason="prefix cached"), ChunkStats(20, 50, reused=True), ChunkStats(70, 10, reason="too short"),
    ChunkStats(80, 20, reason="not stored")])


def test_every_chunk_is_reused_or_cached_or_missed():
    counts = (REQUEST.chunks_found, REQUEST.chunks_reused, REQUEST.chunks_prefix_cached, REQUEST.chunks_missed)
    assert counts == (4, 1, 1, 2)


def test_a_prefix_cached_chunk_is_no_miss_of_the_engine():
    total = EngineStats()
    total.add(REQUEST)
    total.add(REQUEST)
    assert (total.requests, total.blended, total.chunks_reused, total.chunks_prefix_cached) == (2, 2, 2, 2)
    assert total.missed == {"too short": 2, "not stored": 2}


def test_statistics_survive_json():
    told = json.loads(json.dumps(REQUEST.to_dict()))
    assert told["chunks_prefix_cached"] == 1
    assert BlendStats.from_dict(told) == REQUEST
