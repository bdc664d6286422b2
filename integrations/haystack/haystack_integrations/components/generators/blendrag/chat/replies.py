"""What the engine returns, as Haystack's messages and streaming chunks."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from haystack import logging
from haystack.dataclasses import ChatMessage, ComponentInfo, StreamingChunk, ToolCall, ToolCallDelta

from blendrag import BlendOutput
from blendrag.adapters import ChatTurn, Reply, ReplyDelta, logprobs_of, usage_of

logger = logging.getLogger(__name__)


def replies_of(turn: ChatTurn, output: BlendOutput, model: str) -> list[ChatMessage]:
    """A message for each of the output's samples."""
    return [_message(turn.reply(output, index), output, model, index) for index in range(len(output.outputs))]


class ReplyChunks:
    """An answer as it grows: the chunks that are new, and the message that they make.

    Args:
        turn: what was asked.
        model: its name, for the meta.
        sender: the component that streams.
    """

    def __init__(self, turn: ChatTurn, model: str, sender: ComponentInfo) -> None:
        self._stream = turn.stream()
        self._model = model
        self._sender = sender
        self._said = ReplyDelta()
        self._told = 0  # tokens whose log probabilities were told
        self._begun: str | None = None

    def read(self, output: BlendOutput) -> list[StreamingChunk]:
        """What this output adds; the last chunk of all says how the answer ended, and what it took."""
        delta = self._stream.read(output)
        news: list[dict[str, Any]] = []
        if delta.content:
            news.append({"content": delta.content, "index": 0, "start": not self._said.content})
        self._said = ReplyDelta(self._said.content + delta.content, self._said.tool_calls + delta.tool_calls)
        for call in delta.tool_calls:
            told = ToolCallDelta(index=call.index, id=call.id, tool_name=call.name, arguments=call.arguments or None)
            news.append({"content": "", "index": call.index + bool(self._said.content), "start": call.name is not None,
                         "tool_calls": [told]})
        if output.finished:
            end = _meta(output, self._model, 0, bool(self._said.tool_calls))
            news = news or [{"content": ""}]
            news[-1] |= {"meta": end, "finish_reason": end["finish_reason"]}
        return [self._chunk(output, **fields) for fields in news]

    def message(self, output: BlendOutput) -> ChatMessage:
        """The whole answer, whose last output this is."""
        message = _message(Reply.of(self._said), output, self._model, 0)
        message.meta["completion_start_time"] = self._begun
        return message

    def _chunk(self, output: BlendOutput, meta: dict[str, Any] | None = None, **fields: Any) -> StreamingChunk:
        now = datetime.now(UTC).isoformat()
        self._begun = self._begun or now
        meta = (meta or {"model": self._model, "index": 0}) | {"received_at": now}
        if logprobs := logprobs_of(output, start=self._told):
            meta["logprobs"] = logprobs
            self._told = len(output.token_ids)
        return StreamingChunk(meta=meta, component_info=self._sender, **fields)


def _message(reply: Reply, output: BlendOutput, model: str, index: int) -> ChatMessage:
    meta = _meta(output, model, index, bool(reply.tool_calls))
    if logprobs := logprobs_of(output, index):
        meta["logprobs"] = logprobs
    calls = []
    for call in reply.tool_calls:
        try:
            calls.append(ToolCall(id=call.id, tool_name=call.name, arguments=json.loads(call.arguments or "{}")))
        except json.JSONDecodeError:
            logger.warning("The call of {tool} is left out: its arguments are not JSON, {written!r}. Raise max_tokens "
                           "where they are cut short, or name the tool as tool_choice: it holds them to its schema.",
                           tool=call.name, written=call.arguments)
    return ChatMessage.from_assistant(text=reply.content or None, tool_calls=calls, meta=meta)


def _meta(output: BlendOutput, model: str, index: int, calls_tools: bool) -> dict[str, Any]:
    chosen = output.outputs[index]
    reason = "tool_calls" if calls_tools and chosen.finish_reason == "stop" else chosen.finish_reason
    return {"model": model, "index": index, "finish_reason": reason, "stop_reason": chosen.stop_reason,
            "usage": usage_of([output]), "blend": output.stats.to_dict()}
