"""Tool calling: what is asked of the model, and how its answer is read.

A forced call is guided: vLLM's structured outputs hold the answer to a JSON schema, so that any model obeys.  Where the
model may choose, it writes calls in the syntax of its chat template, which vLLM's parser of that syntax reads.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from blendrag.adapters.replies import ReplyDelta, ReplyReader, TextReader, ToolCallDelta
from blendrag.adapters.syntax import tool_syntax
from blendrag.errors import ConfigError, PromptError

Tool = Mapping[str, Any]
"""`{"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}`"""


@dataclass(frozen=True)
class ToolUse:
    """How tools are called in one turn.

    Attributes:
        reader: makes a reader of the answer.
        sampling: fields of vLLM's `SamplingParams` that the answer needs.
    """

    reader: Callable[[], ReplyReader] = TextReader
    sampling: dict[str, Any] = field(default_factory=dict)


def tool_use(tools: Sequence[Tool], choice: str, *, parallel: bool, template: str, parser: str,
             tokenizer: Any) -> ToolUse:
    """The rules for a turn in which the model may, must or must not call a tool.

    Args:
        choice: "auto", "none", "required", or the name of the tool that must be called.
        parallel: the model may call several tools at once.
        template: the chat template in use.
        parser: name of vLLM's tool parser, or "auto" to tell it by the template.

    Raises:
        PromptError: a tool of that name is not among the tools, a call is required where there is no tool, or no parser
            fits the template.
    """
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    if choice not in ("auto", "none", "required", *functions):
        raise PromptError(f"tool_choice {choice!r} is none of the tools: use auto, none, required or one of "
                          f"{sorted(functions)}")
    if choice == "required" and not functions:
        raise PromptError("tool_choice is required but there are no tools: pass some, or leave it out")
    if choice == "none" or not functions:
        return ToolUse()
    if choice == "auto":
        from blendrag.runtime.tool_parsing import NativeReader

        syntax = tool_syntax(template, parser)
        # Some models spell calls with special tokens.
        return ToolUse(lambda: NativeReader(tokenizer, syntax, tools), {"skip_special_tokens": False})
    if choice == "required":
        schema = _calls_schema(functions.values(), parallel)
        return ToolUse(RequiredReader, {"structured_outputs": guided(schema)})
    return ToolUse(lambda: NamedReader(choice), {"structured_outputs": guided(_parameters(functions[choice]))})


def guided(schema: Mapping[str, Any] | None) -> Any:
    """vLLM's parameters for an answer that is JSON of this schema, or any JSON object."""
    from blendrag.runtime.guiding import guided_json  # loads vLLM: not before the first request

    return guided_json(schema)


def answer_form(response_format: Mapping[str, Any] | None) -> Any:
    """vLLM's parameters for an answer of this form; None for text.

    Args:
        response_format: `{"type": "json_schema", "json_schema": {"schema": ...}}`, `{"type": "json_object"}` or
            `{"type": "text"}`, as in OpenAI's API.

    Raises:
        ConfigError: it is none of these.
    """
    match dict(response_format or {"type": "text"}):
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return guided(None)
        case {"type": "json_schema", "json_schema": {"schema": Mapping() as schema}}:
            return guided(schema)
    raise ConfigError(f"response_format is not {response_format!r}: use text, json_object, or "
                      '{"type": "json_schema", "json_schema": {"schema": {...}}}')


def new_call_id() -> str:
    """Nine letters and digits, as Mistral's templates demand."""
    return uuid.uuid4().hex[:9]


class NamedReader:
    """The answer is the arguments of a tool that had to be called."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._text = TextReader()
        self._begun = False

    def feed(self, text: str, token_ids: list[int], finished: bool) -> ReplyDelta:
        """The arguments that were added."""
        new = self._text.feed(text, token_ids, finished).content
        if self._begun:
            return ReplyDelta(tool_calls=(ToolCallDelta(0, arguments=new),) if new else ())
        if not new and not finished:
            return ReplyDelta()
        self._begun = True
        return ReplyDelta(tool_calls=(ToolCallDelta(0, new_call_id(), self._name, new),))


class RequiredReader:
    """The answer is a JSON list of `{"name": ..., "arguments": {...}}`, each reported once it is complete."""

    def __init__(self) -> None:
        self._read = 0
        self._count = 0

    def feed(self, text: str, token_ids: list[int], finished: bool) -> ReplyDelta:
        """The calls that were completed; what remains of an answer that was cut short is text."""
        calls = []
        while (start := text.find("{", self._read)) >= 0:
            try:
                call, self._read = json.JSONDecoder().raw_decode(text, start)
            except json.JSONDecodeError:
                break
            arguments = json.dumps(call["arguments"], ensure_ascii=False)
            calls.append(ToolCallDelta(self._count, new_call_id(), call["name"], arguments))
            self._count += 1
        rest = text[self._read:] if finished else ""
        return ReplyDelta("" if rest.strip() in ("", "]") else rest, tuple(calls))


def _calls_schema(functions: Iterable[Mapping[str, Any]], parallel: bool) -> dict[str, Any]:
    definitions: dict[str, Any] = {}
    calls = []
    for function in functions:
        parameters = _parameters(function)
        definitions |= parameters.pop("$defs", {})
        calls.append({"type": "object", "properties": {"name": {"const": function["name"]}, "arguments": parameters},
                      "required": ["name", "arguments"], "additionalProperties": False})
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return schema | ({} if parallel else {"maxItems": 1}) | ({"$defs": definitions} if definitions else {})


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    return dict(function.get("parameters") or {"type": "object", "properties": {}})
