"""vLLM's tool parsers: they read the tool calls in a model's answer, in the syntax that it was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

from blendrag.adapters.replies import ReplyDelta, ToolCallDelta


def parser_names() -> list[str]:
    """Every tool parser that vLLM has."""
    return list(ToolParserManager.list_registered())


class NativeReader:
    """Reads an answer that may hold tool calls.

    Args:
        tokenizer: the model's.
        syntax: name of vLLM's parser.
        tools: those the model was shown, in OpenAI's form.
    """

    def __init__(self, tokenizer: Any, syntax: str, tools: Sequence[Mapping[str, Any]]) -> None:
        self._request = ChatCompletionRequest(model="", messages=[], tools=[dict(tool) for tool in tools],
                                              tool_choice="auto")
        kind = ToolParserManager.get_tool_parser(syntax)
        self._whole = kind(tokenizer, self._request.tools)
        self._pieces = kind(tokenizer, self._request.tools)
        self._text, self._token_ids = "", list[int]()
        self._content = ""
        self._arguments: list[str] = []

    def feed(self, text: str, token_ids: list[int], finished: bool) -> ReplyDelta:
        """What is new; text that may be the beginning of a call is held back until that is certain."""
        if finished:
            return self._rest(text)
        found = self._pieces.extract_tool_calls_streaming(
            self._text, text, text[len(self._text):], self._token_ids, token_ids, token_ids[len(self._token_ids):],
            self._request)
        self._text, self._token_ids = text, list(token_ids)
        if found is None:
            return ReplyDelta()
        calls = [self._call(call.index, call.id, call.function.name if call.function else None,
                            (call.function.arguments if call.function else None) or "")
                 for call in found.tool_calls or []]
        self._content += found.content or ""
        return ReplyDelta(found.content or "", tuple(calls))

    def _rest(self, text: str) -> ReplyDelta:
        """What the whole answer holds beyond the pieces that were told: they may end before it does."""
        found = self._whole.extract_tool_calls(text, self._request)
        content = found.content or ""
        new = content[len(self._content):] if content.startswith(self._content) else ""
        calls = []
        for index, call in enumerate(found.tool_calls):
            arguments = call.function.arguments
            if index >= len(self._arguments):
                calls.append(self._call(index, call.id, call.function.name, arguments))
            elif missing := _continuation(self._arguments[index], arguments):
                calls.append(self._call(index, None, None, missing))
        return ReplyDelta(new, tuple(calls))

    def _call(self, index: int, call_id: str | None, name: str | None, arguments: str) -> ToolCallDelta:
        while len(self._arguments) <= index:
            self._arguments.append("")
        self._arguments[index] += arguments
        return ToolCallDelta(index, call_id, name, arguments)


def _continuation(told: str, whole: str) -> str:
    """What completes the arguments; nothing where they are complete, if spelled in another way."""
    if whole.startswith(told):
        return whole[len(told):]
    try:
        json.loads(told)
    except json.JSONDecodeError:
        written = told.replace(" ", "").replace("\n", "")
        return whole[len(told):] if whole.replace(" ", "").startswith(written) else ""
    return ""
