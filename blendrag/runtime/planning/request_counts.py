"""What became of requests, counted for metrics."""

from __future__ import annotations

from collections import Counter

from blendrag.stats import NOT_WORTH, PREFIX_CACHED, BlendStats

OUTCOMES = {
    "blended": "a blend pass ran",
    "continued": "vLLM's prefix cache held the blended blocks of an earlier prompt that it begins with",
    "prefix cached": "vLLM's prefix cache held what is stored of it",
    "not worth a pass": "a full prefill was estimated to be as quick",
    "nothing stored": "none of its chunks could be used",
    "failed": "the blend pass failed, and vLLM computed the prompt",
}


class RequestCounts:
    """Requests with chunks, and those that continue such, by what became of them; and where their tokens came from."""

    def __init__(self) -> None:
        self._requests: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def add(self, stats: BlendStats) -> None:
        """Counts a request that has ended."""
        others = stats.prompt_tokens - stats.reused_tokens
        cached = min(stats.prefix_cached_tokens, others)  # a pass may replace what vLLM's prefix cache held
        self._requests[outcome(stats)] += 1
        self._tokens.update({"reused": stats.reused_tokens, "prefix cache": cached, "computed": others - cached})

    def news(self) -> dict[str, dict[str, int]] | None:
        """What was counted since the last call; None where that is nothing."""
        if not self._requests:
            return None
        news = {"requests": dict(self._requests), "tokens": dict(self._tokens)}
        self._requests.clear()
        self._tokens.clear()
        return news


def outcome(stats: BlendStats) -> str:
    """One of `OUTCOMES`."""
    reasons = {chunk.reason for chunk in stats.chunks}
    if stats.failure:
        return "failed"
    if stats.chunks_reused:
        return "blended"
    if stats.continued:
        return "continued"
    if NOT_WORTH in reasons:
        return "not worth a pass"
    return "prefix cached" if PREFIX_CACHED in reasons else "nothing stored"
