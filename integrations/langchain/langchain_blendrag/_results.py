"""What the engine returns, in LangChain's terms."""

from __future__ import annotations

from typing import Any, cast

from blendrag import BlendOutput
from blendrag.adapters import ChatTurn, ReplyStream, logprobs_of, usage_of
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk

from langchain_blendrag._tools import call_chunks, sort_calls


def generation_info(output: BlendOutput, candidate: int = 0) -> dict[str, Any]:
    """How an answer ended, and what blending did for its prompt (`BlendStats.to_dict`)."""
    chosen = output.outputs[candidate]
    return {"finish_reason": chosen.finish_reason, "stop_reason": chosen.stop_reason, "blend": output.stats.to_dict()}


def logprobs_info(output: BlendOutput, candidate: int = 0, start: int = 0) -> dict[str, Any]:
    """`{"logprobs": ...}` of the tokens from `start` on, in the form of OpenAI's API; nothing if not asked for."""
    found = logprobs_of(output, candidate, start)
    return {} if found is None else {"logprobs": found}


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


def chat_generation(turn: ChatTurn, output: BlendOutput, candidate: int, model: str) -> ChatGeneration:
    """One of the answers of a finished request."""
    reply = turn.reply(output, candidate)
    info = _ending(output, candidate, bool(reply.tool_calls)) | logprobs_info(output, candidate)
    message = AIMessage(content=reply.content, usage_metadata=usage_metadata(output),
                        response_metadata=info | _of_model(model), **sort_calls(reply.tool_calls))
    return ChatGeneration(message=message, generation_info=info)


class ChatChunks:
    """Turns the cumulative outputs of one streamed answer into what each of them adds.

    Args:
        reader: of this answer.
        model: its name.
    """

    def __init__(self, reader: ReplyStream, model: str) -> None:
        self._reader = reader
        self._model = model
        self._tokens = 0
        self._calls = False

    def add(self, output: BlendOutput) -> ChatGenerationChunk:
        """What is new; the last chunk carries usage and statistics."""
        new = self._reader.read(output)
        self._calls = self._calls or bool(new.tool_calls)
        info = logprobs_info(output, start=self._tokens)
        self._tokens = len(output.token_ids)
        last: dict[str, Any] = {}
        if output.finished:
            info |= _ending(output, 0, self._calls)
            last = {"usage_metadata": usage_metadata(output), "chunk_position": "last",
                    "response_metadata": info | _of_model(self._model)}
        message = AIMessageChunk(content=new.content, tool_call_chunks=call_chunks(new.tool_calls), **last)
        return ChatGenerationChunk(message=message, generation_info=info or None)


def _ending(output: BlendOutput, candidate: int, calls: bool) -> dict[str, Any]:
    info = generation_info(output, candidate)
    if calls and info["finish_reason"] == "stop":
        info["finish_reason"] = "tool_calls"  # as OpenAI's API calls it
    return info


def _of_model(model: str) -> dict[str, Any]:
    return {"model_name": model, "model_provider": "blendrag"}
