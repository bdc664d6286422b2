"""Tools, structured output and log probabilities of `ChatBlend` on a real engine."""

from __future__ import annotations

import json
import math
from functools import reduce
from operator import add
from typing import Annotated, Any, TypedDict

import pytest
from blendrag import BlendEngine
from blendrag.errors import PromptError
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.outputs import GenerationChunk
from langchain_core.tools import tool
from pydantic import BaseModel

from langchain_blendrag import BlendLLM, ChatBlend

QUESTION = "What is the value of magic_function(3)? Use the tool."


@pytest.fixture
def engine(smollm2_engine: BlendEngine) -> BlendEngine:
    """One that writes what makes sense."""
    return smollm2_engine


class Answer(BaseModel):
    """An answer."""

    correct: bool


class AnswerDict(TypedDict):
    """An answer."""

    correct: Annotated[bool, ..., "whether it is"]


FORMS = [Answer, AnswerDict, Answer.model_json_schema()]


@tool
def magic_function(input: int) -> int:  # noqa: A002
    """Apply a magic function to an input."""
    return input + 2


@tool
def now() -> str:
    """The time."""
    return "12:00"


@pytest.fixture
def chat(engine: BlendEngine, hermes: str) -> ChatBlend:
    return ChatBlend(engine=engine, chat_template=hermes, temperature=0, max_tokens=24)


def test_a_forced_call_is_made_whole_and_streamed_alike(chat: ChatBlend) -> None:
    bound = chat.bind_tools([magic_function, now], tool_choice="magic_function")
    answer = bound.invoke(QUESTION)
    [call] = answer.tool_calls
    assert (call["name"], call["args"]) == ("magic_function", {"input": 3})
    assert (answer.content, answer.response_metadata["finish_reason"]) == ("", "tool_calls")
    chunks: list[Any] = list(bound.stream(QUESTION))
    assert sum(bool(chunk.tool_call_chunks) for chunk in chunks) > 3
    whole = reduce(add, chunks)
    assert whole.tool_calls == [{**call, "id": whole.tool_calls[0]["id"]}]
    assert whole.tool_calls[0]["id"]
    assert whole.response_metadata["finish_reason"] == "tool_calls"
    assert whole.usage_metadata == answer.usage_metadata or whole.usage_metadata["output_tokens"] > 0


async def test_async_twins_make_the_same_calls(chat: ChatBlend) -> None:
    bound = chat.bind_tools([now], tool_choice=True, parallel_tool_calls=False)
    answer = await bound.ainvoke("What time is it?")
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("now", {})]
    whole: Any = reduce(add, [chunk async for chunk in bound.astream("What time is it?")])
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("now", {})]


def test_a_model_that_may_choose_is_left_free(chat: ChatBlend) -> None:
    for choice in (None, "none"):
        answer = chat.bind_tools([now], tool_choice=choice).invoke("Hello", max_tokens=6)
        assert answer.content
        assert answer.tool_calls == []


def test_a_call_that_was_cut_short_is_invalid_not_lost(chat: ChatBlend) -> None:
    answer = chat.bind_tools([magic_function], tool_choice="magic_function").invoke(QUESTION, max_tokens=3)
    assert answer.tool_calls == []
    [call] = answer.invalid_tool_calls
    assert call["name"] == "magic_function"
    assert str(call["args"]).startswith("{")
    assert answer.response_metadata["finish_reason"] == "length"


def test_the_template_reads_tools_and_earlier_calls(chat: ChatBlend) -> None:
    messages = [HumanMessage("Hi"), AIMessage("", tool_calls=[{"name": "now", "args": {}, "id": "1"}]),
                ToolMessage("12:00", tool_call_id="1")]
    text = chat.to_prompt(messages, tools=chat.bind_tools([now]).kwargs["tools"]).text  # type: ignore[attr-defined]
    assert '<tools>\n{"type": "function", "function": {"name": "now"' in text
    assert '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>' in text
    assert "<tool_response>\n12:00\n</tool_response>" in text
    assert chat.get_num_tokens_from_messages(messages, [now]) > chat.get_num_tokens_from_messages(messages) + 20


def test_a_template_without_tools_is_refused(engine: BlendEngine) -> None:
    with pytest.raises(PromptError, match="does not show tools"):
        ChatBlend(engine=engine).bind_tools([now]).invoke("Hello")


@pytest.mark.parametrize("schema", FORMS)
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_answers_have_the_form_that_was_asked_for(chat: ChatBlend, schema: Any, method: Any) -> None:
    form = chat.with_structured_output(schema, method=method)
    found = form.invoke("Is 2 + 2 = 4?")
    assert isinstance(found, Answer) if schema is Answer else isinstance(found["correct"], bool)
    *_, last = form.stream("Is 2 + 2 = 4?")
    assert last == found


async def test_async_answers_have_it_too(chat: ChatBlend) -> None:
    assert isinstance(await chat.with_structured_output(Answer).ainvoke("Is 2 + 2 = 4?"), Answer)


def test_the_raw_answer_comes_with_what_went_wrong(chat: ChatBlend) -> None:
    good = chat.with_structured_output(Answer, include_raw=True).invoke("Is 2 + 2 = 4?")
    assert isinstance(good["raw"], AIMessage)
    assert (json.loads(good["raw"].content), good["parsing_error"]) == (good["parsed"].model_dump(), None)
    short = chat.with_structured_output(Answer, include_raw=True, max_tokens=2).invoke("Is 2 + 2 = 4?")
    assert short["parsed"] is None
    assert short["parsing_error"] is not None


def test_json_mode_answers_in_json(chat: ChatBlend) -> None:
    bound = chat.bind(response_format={"type": "json_object"})
    assert str(bound.invoke("Answer in JSON.", max_tokens=6).content).startswith("{")
    parsed = chat.with_structured_output(method="json_mode", include_raw=True).invoke("Answer in JSON.", max_tokens=6)
    assert set(parsed) == {"raw", "parsed", "parsing_error"}


def test_log_probabilities_come_in_openais_form(chat: ChatBlend, engine: BlendEngine) -> None:
    answer = chat.invoke("Hello", logprobs=True, top_logprobs=2, max_tokens=4)
    content = answer.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content).startswith(str(answer.content))
    assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2 for entry in content)
    whole = reduce(add, chat.stream("Hello", logprobs=True, top_logprobs=2, max_tokens=4))
    assert isinstance(whole, AIMessageChunk)
    streamed = whole.response_metadata["logprobs"]["content"]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in content]
    assert all(math.isclose(one["logprob"], other["logprob"], abs_tol=1e-3)
               for one, other in zip(streamed, content, strict=True))
    assert "logprobs" not in chat.invoke("Hello", max_tokens=2).response_metadata
    always = BlendLLM(engine=engine, temperature=0, max_tokens=2, logprobs=True)
    [[generation]] = always.generate(["Hello"]).generations
    assert len((generation.generation_info or {})["logprobs"]["content"]) == 2
    pieces: list[GenerationChunk] = list(always._stream("Hello"))
    assert [len((piece.generation_info or {})["logprobs"]["content"]) for piece in pieces] == [1, 1]
