"""Tools in LangChain's terms and in OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from blendrag.adapters import ToolCall, ToolCallDelta
from blendrag.errors import ConfigError
from langchain_core.messages import InvalidToolCall, ToolCallChunk
from langchain_core.messages import ToolCall as LangChainToolCall
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk


def choice_of(tool_choice: Any) -> str:
    """A `tool_choice` as LangChain's models take it, as `ChatTurn` takes it.

    Raises:
        ConfigError: it is none of "auto", "none", "any", "required", a bool, a tool's name, or OpenAI's mapping.
    """
    match tool_choice:
        case None | False:
            return "auto"
        case True | "any":
            return "required"
        case str():
            return tool_choice
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise ConfigError(f"tool_choice is not {tool_choice!r}: use auto, none, any, required, True, a tool's name, or "
                      '{"type": "function", "function": {"name": ...}}')


def sort_calls(calls: tuple[ToolCall, ...]) -> dict[str, list[Any]]:
    """The calls of a whole answer, as fields of an `AIMessage`: those that can be made, and those that cannot."""
    good: list[LangChainToolCall] = []
    bad: list[InvalidToolCall] = []
    for call in calls:
        arguments, error = _arguments(call.arguments)
        if arguments is not None:
            good.append(tool_call(name=call.name, args=arguments, id=call.id))
        else:
            bad.append(invalid_tool_call(name=call.name, args=call.arguments, id=call.id, error=error))
    return {"tool_calls": good, "invalid_tool_calls": bad}


def call_chunks(calls: tuple[ToolCallDelta, ...]) -> list[ToolCallChunk]:
    """What is new of the calls, as an `AIMessageChunk` holds it."""
    return [tool_call_chunk(name=call.name, args=call.arguments, id=call.id, index=call.index) for call in calls]


def _arguments(text: str) -> tuple[dict[str, Any] | None, str]:
    try:
        found = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        return None, f"the arguments are not JSON: {error}"
    if not isinstance(found, Mapping):
        return None, f"the arguments are not a JSON object but {type(found).__name__}"
    return dict(found), ""
