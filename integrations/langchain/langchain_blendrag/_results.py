"""What the engine returns, in LangChain's terms."""

from __future__ import annotations

from typing import Any, cast

from blendrag import BlendOutput
from blendrag.adapters import usage_of
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata


def generation_info(output: BlendOutput, candidate: int = 0) -> dict[str, Any]:
    """How an answer ended, and what blending did for its prompt (`BlendStats.to_dict`)."""
    chosen = output.outputs[candidate]
    return {"finish_reason": chosen.finish_reason, "stop_reason": chosen.stop_reason, "blend": output.stats.to_dict()}


def response_metadata(output: BlendOutput, model: str, candidate: int = 0) -> dict[str, Any]:
    """`generation_info`, and which model it was."""
    return generation_info(output, candidate) | {"model_name": model, "model_provider": "blendrag"}


def usage_metadata(output: BlendOutput) -> UsageMetadata:
    """Token counts of one request.

    `cache_read` counts the tokens whose stored KV was used as it is, `blend_recomputed` those of stored chunks that
    were computed again, `blend_prefix_cached` the leading tokens that vLLM's own prefix cache held.
    """
    usage, stats = usage_of([output]), output.stats
    details = {
        "cache_read": stats.reused_tokens,
        "blend_recomputed": stats.recomputed_tokens,
        "blend_prefix_cached": stats.prefix_cached_tokens,
    }
    return UsageMetadata(
        input_tokens=usage["prompt_tokens"],
        output_tokens=usage["completion_tokens"],
        total_tokens=usage["total_tokens"],
        input_token_details=cast(InputTokenDetails, details),
    )
