"""The engine's outputs as LlamaIndex's responses, whole or piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from llama_index.core.base.llms.types import ChatResponse, CompletionResponse

from blendrag import BlendOutput, BlendPrompt
from blendrag.adapters import Call, ChatTurn, Reply, ReplyDelta, logprobs_of, usage_of
from llama_index.llms.blendrag._messages import to_logprobs, to_message

R = TypeVar("R", CompletionResponse, ChatResponse)


@dataclass(frozen=True)
class Request(Generic[R]):
    """What one call asks of the engine.

    Attributes:
        read: the response to an output; None where it holds nothing new.
    """

    prompt: BlendPrompt
    call: Call
    read: Callable[[BlendOutput], R | None]


class CompletionReader:
    """Responses to one completion: each has the text so far, and what is new of it."""

    def __init__(self) -> None:
        self._said = ""
        self._tokens = 0

    def __call__(self, output: BlendOutput) -> CompletionResponse | None:
        """The response to this output."""
        said, tokens = self._said, self._tokens
        if output.text == said and not output.finished:
            return None
        self._said, self._tokens = output.text, len(output.token_ids)
        return CompletionResponse(text=output.text, delta=output.text[len(said):], raw=_raw(output),
                                  logprobs=to_logprobs(logprobs_of(output, start=tokens)))


class ChatReader:
    """Responses to one turn of a conversation: each has the message so far, and what is new of its text."""

    def __init__(self, turn: ChatTurn) -> None:
        self._stream = turn.stream()
        self._content = ""
        self._calls: tuple[Any, ...] = ()
        self._tokens = 0

    def __call__(self, output: BlendOutput) -> ChatResponse | None:
        """The response to this output."""
        new = self._stream.read(output)
        if not (new.content or new.tool_calls or output.finished):
            return None
        self._content += new.content
        self._calls += new.tool_calls
        tokens, self._tokens = self._tokens, len(output.token_ids)
        reply = Reply.of(ReplyDelta(self._content, self._calls))
        return ChatResponse(message=to_message(reply.content, reply.tool_calls), delta=new.content, raw=_raw(output),
                            logprobs=to_logprobs(logprobs_of(output, start=tokens)))


def _raw(output: BlendOutput) -> dict[str, Any] | None:
    if not output.finished:
        return None
    return {"finish_reason": output.finish_reason, "stop_reason": output.outputs[0].stop_reason,
            "usage": usage_of([output]), "blend": output.stats.to_dict()}
