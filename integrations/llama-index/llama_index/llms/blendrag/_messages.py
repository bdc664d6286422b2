"""LlamaIndex's messages and responses, and those of OpenAI's API, which chat templates and `ChatTurn` speak."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    LogProb,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.llms.utils import parse_partial_json

from blendrag.adapters import ToolCall
from blendrag.errors import PromptError

_ROLES = {MessageRole.FUNCTION: "tool", MessageRole.CHATBOT: "assistant", MessageRole.MODEL: "assistant"}


def to_rows(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates take them.

    Raises:
        PromptError: a message holds what the model cannot read.
    """
    return [_row(message) for message in messages]


def _row(message: ChatMessage) -> dict[str, Any]:
    calls, thoughts = [], []
    for block in message.blocks:
        match block:
            case ToolCallBlock():
                calls.append({"id": block.tool_call_id or "", "type": "function",
                              "function": {"name": block.tool_name, "arguments": block.tool_kwargs}})
            case ThinkingBlock():
                thoughts.append(block.content or "")
            case TextBlock() | CachePoint():
                pass
            case _:
                raise PromptError("the model reads text only: leave images, audio and files out of the messages")
    row: dict[str, Any] = {"role": _ROLES.get(message.role, message.role.value), "content": message.content or ""}
    # Messages of older integrations carry their calls beside the blocks.
    if calls := calls or list(message.additional_kwargs.get("tool_calls") or []):
        row["tool_calls"] = [call if isinstance(call, dict) else call.model_dump() for call in calls]
    if thoughts:
        row["reasoning_content"] = "".join(thoughts)
    return row | {name: message.additional_kwargs[name] for name in ("tool_call_id", "name")
                  if name in message.additional_kwargs}


def to_message(content: str, calls: Sequence[ToolCall]) -> ChatMessage:
    """The model's answer; arguments that are not complete JSON stay text."""
    blocks: list[Any] = [TextBlock(text=content)] if content or not calls else []
    blocks += [ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=_arguments(call)) for call in calls]
    extra = {"tool_calls": [{"id": call.id, "type": "function",
                             "function": {"name": call.name, "arguments": call.arguments}} for call in calls]}
    return ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks, additional_kwargs=extra if calls else {})


def to_logprobs(found: dict[str, Any] | None) -> list[list[LogProb]] | None:
    """Of each token, what could have stood in its place, the most likely first."""
    if found is None:
        return None
    return [[LogProb(token=one["token"], logprob=one["logprob"], bytes=one["bytes"]) for one in token["top_logprobs"]]
            for token in found["content"]]


def tool_choice_of(choice: Any, required: bool, names: Sequence[str]) -> str:
    """`ChatTurn`'s tool_choice: "auto", "none", "required", or the name of a tool.

    Args:
        choice: as a caller says it: the same, or OpenAI's mapping with a name in it; None for no wish.
        required: some tool must be called.
        names: of the tools.
    """
    if isinstance(choice, dict):
        choice = choice.get("function", {}).get("name")
    if choice in (None, "auto") and required:
        return names[0] if len(names) == 1 else "required"
    if choice == "any":
        return "required"
    return str(choice or "auto")


def _arguments(call: ToolCall) -> dict[str, Any] | str:
    try:
        found = json.loads(call.arguments or "{}")
    except json.JSONDecodeError:
        return call.arguments
    return found if isinstance(found, dict) else call.arguments


def selection_of(block: ToolCallBlock) -> ToolSelection:
    """A tool call as LlamaIndex makes it; arguments that are not complete are read as far as they go."""
    arguments = block.tool_kwargs
    if isinstance(arguments, str):
        try:
            arguments = parse_partial_json(arguments)
        except ValueError:
            arguments = {}
    return ToolSelection(tool_id=block.tool_call_id or "", tool_name=block.tool_name, tool_kwargs=arguments)
