"""Tool choices, tool calls and messages, without an engine."""

from __future__ import annotations

from typing import Any

import pytest
from blendrag.adapters import ToolCall, ToolCallDelta
from blendrag.errors import ConfigError
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel, Field

from langchain_blendrag import ChatBlend
from langchain_blendrag._messages import artifact_texts, openai_messages
from langchain_blendrag._tools import call_chunks, choice_of, sort_calls


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


class Person(BaseModel):
    """A person."""

    name: str
    age: int | None = Field(default=None, description="in years")


@pytest.mark.parametrize(("given", "expected"), [
    (None, "auto"), (False, "auto"), ("auto", "auto"), ("none", "none"), ("any", "required"), (True, "required"),
    ("required", "required"), ("add", "add"), ({"type": "function", "function": {"name": "add"}}, "add"),
])
def test_tool_choices_of_langchain_and_openai(given: Any, expected: str) -> None:
    assert choice_of(given) == expected


@pytest.mark.parametrize("given", [3, {"name": "add"}, ["add"]])
def test_other_tool_choices_are_refused_with_the_remedy(given: Any) -> None:
    with pytest.raises(ConfigError, match="use auto, none, any, required, True, a tool's name"):
        choice_of(given)


def test_calls_that_cannot_be_made_are_kept_apart() -> None:
    calls = (ToolCall("1", "add", '{"a": 1, "b": 2}'), ToolCall("2", "add", '{"a": 1,'), ToolCall("3", "now", ""),
             ToolCall("4", "add", "[1, 2]"))
    message = AIMessage("", **sort_calls(calls))
    assert [(call["id"], call["args"]) for call in message.tool_calls] == [("1", {"a": 1, "b": 2}), ("3", {})]
    assert [(call["id"], call["args"]) for call in message.invalid_tool_calls] == [("2", '{"a": 1,'), ("4", "[1, 2]")]
    assert "not JSON" in str(message.invalid_tool_calls[0]["error"])
    assert "not a JSON object but list" in str(message.invalid_tool_calls[1]["error"])


def test_new_pieces_of_calls_keep_their_place() -> None:
    [first, second] = call_chunks((ToolCallDelta(0, "1", "add", "{"), ToolCallDelta(1, arguments="}")))
    assert (first["index"], first["id"], first["name"], first["args"]) == (0, "1", "add", "{")
    assert (second["index"], second["id"], second["name"], second["args"]) == (1, None, None, "}")


def test_any_form_of_a_tool_is_bound() -> None:
    openai = {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {}}}
    bound: Any = ChatBlend(model="m").bind_tools([add, Person, openai], tool_choice="any", parallel_tool_calls=False)
    assert [shown["function"]["name"] for shown in bound.kwargs["tools"]] == ["add", "Person", "now"]
    assert bound.kwargs["tools"][0]["function"]["parameters"]["required"] == ["a", "b"]
    assert (bound.kwargs["tool_choice"], bound.kwargs["parallel_tool_calls"]) == ("any", False)
    strict: Any = ChatBlend(model="m").bind_tools([Person], strict=True)
    assert strict.kwargs["tools"][0]["function"]["parameters"]["additionalProperties"] is False
    assert set(strict.kwargs) == {"tools"}


def test_messages_say_which_calls_were_made() -> None:
    good = {"name": "add", "args": {"a": 1}, "id": "1", "type": "tool_call"}
    bad = {"name": "add", "args": "{", "id": "2", "error": "cut short", "type": "invalid_tool_call"}
    reasoned = AIMessage([{"type": "reasoning", "reasoning": "Hm."}, {"type": "text", "text": "I add."}, good],
                         tool_calls=[good], invalid_tool_calls=[bad])
    rows = openai_messages([HumanMessage([{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]), reasoned,
                            ToolMessage("3", tool_call_id="1", status="error")])
    assert rows[0] == {"role": "user", "content": "1\n2"}
    assert rows[1]["content"] == "I add."
    assert [(call["id"], call["function"]["arguments"]) for call in rows[1]["tool_calls"]] == [("1", '{"a": 1}'),
                                                                                              ("2", "{")]
    assert (rows[2]["role"], rows[2]["content"], rows[2]["tool_call_id"]) == ("tool", "3", "1")


def test_documents_are_found_in_artifacts_only() -> None:
    messages = [HumanMessage("a"), ToolMessage("b", tool_call_id="1", artifact=[Document("c"), "d", Document("e")]),
                ToolMessage("f", tool_call_id="2", artifact={"g": 1}), ToolMessage("h", tool_call_id="3")]
    assert list(artifact_texts(messages)) == ["c", "e"]


def test_structured_output_refuses_what_it_cannot_do() -> None:
    model = ChatBlend(model="m")
    with pytest.raises(ConfigError, match="there is no method 'xml'"):
        model.with_structured_output(Person, method="xml")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs a schema"):
        model.with_structured_output()


def test_the_profile_says_what_is_known_before_the_model_is_loaded() -> None:
    profile = ChatBlend(model="m", max_tokens=7, engine_args={"max_model_len": 99}).profile
    assert profile is not None
    assert (profile["max_input_tokens"], profile["max_output_tokens"]) == (99, 7)
    assert profile["tool_calling"]
    assert profile["tool_choice"]
    assert not profile["image_inputs"]
    assert ChatBlend(model="m", profile={"max_input_tokens": 5}).profile == {"max_input_tokens": 5}
