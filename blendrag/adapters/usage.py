"""Token counts in the form that OpenAI's API made common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blendrag import BlendOutput


def usage_of(outputs: Sequence[BlendOutput]) -> dict[str, Any]:
    """Sums over requests; `cached_tokens` are the prompt tokens whose stored KV was used as it is."""
    prompt = sum(output.stats.prompt_tokens for output in outputs)
    completion = sum(len(candidate.token_ids) for output in outputs for candidate in output.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.stats.reused_tokens for output in outputs)},
    }
