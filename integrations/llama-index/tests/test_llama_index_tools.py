"""Tools and structured answers, with LlamaIndex's own programs and agents."""

from __future__ import annotations

import json
from typing import Any

import pytest
from blendrag import BlendEngine
from blendrag.adapters import ToolCall
from blendrag.errors import ConfigError, PromptError
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import CacheControl, CachePoint, ChatResponse, ThinkingBlock, ToolCallBlock
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.llms import ChatMessage, TextBlock
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.core.types import PydanticProgramMode
from llama_index_reference import Exchange

from llama_index.llms.blendrag import BlendLLM
from llama_index.llms.blendrag._messages import to_message, to_rows, tool_choice_of

SHOWING_TOOLS = """{% for tool in tools or [] %}{{ tool.function.name }}: <tool_call>JSON</tool_call>
{% endfor %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}{{ call.function.arguments.place }}{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
ASKED = "What is the weather in Arlon?"


class Place(BaseModel):
    """A place."""

    size: int


def weather(size: int) -> str:
    """Tells the weather of a place by its size."""
    return f"{'rain' if size >= 0 else 'snow'}"


WEATHER = FunctionTool.from_defaults(weather)
SMALL = {"type": "object", "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 9}},
         "required": ["size"], "additionalProperties": False}


@pytest.fixture
def tools_llm(engine: BlendEngine) -> BlendLLM:
    return BlendLLM(engine=engine, temperature=0, max_tokens=16, chat_template=SHOWING_TOOLS)


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the tool take small numbers only: a small model never ends a large one."""
    monkeypatch.setattr(type(WEATHER.metadata), "get_parameters_dict", lambda _: SMALL)


def test_the_chat_template_says_whether_there_are_tools(llm: BlendLLM, tools_llm: BlendLLM) -> None:
    assert not llm.metadata.is_function_calling_model
    assert tools_llm.metadata.is_function_calling_model
    with pytest.raises(PromptError, match="does not show tools"):
        llm.chat_with_tools([WEATHER], ASKED)


@pytest.mark.usefixtures("forced")
async def test_a_required_call_is_made_in_every_way(tools_llm: BlendLLM, exchanges: list[Exchange]) -> None:
    how: dict[str, Any] = {"user_msg": ASKED, "tool_required": True}
    whole = tools_llm.chat_with_tools([WEATHER], **how)
    [call] = tools_llm.get_tool_calls_from_response(whole)
    assert (call.tool_name, list(call.tool_kwargs)) == ("weather", ["size"])
    assert [block.tool_kwargs for block in whole.message.blocks] == [call.tool_kwargs]
    assert whole.raw["usage"]["completion_tokens"] > 0
    pieces = list(tools_llm.stream_chat_with_tools([WEATHER], **how))
    assert len(pieces) > 2
    streamed = [pieces[-1], (await tools_llm.achat_with_tools([WEATHER], **how))]
    streamed += [piece async for piece in await tools_llm.astream_chat_with_tools([WEATHER], **how)][-1:]
    for response in streamed:
        [same] = tools_llm.get_tool_calls_from_response(response)
        assert (same.tool_name, same.tool_kwargs) == (call.tool_name, call.tool_kwargs)
    assert "weather: <tool_call>" in exchanges[0].prompt
    assert len({exchange.prompt for exchange in exchanges}) == 1


@pytest.mark.usefixtures("forced")
def test_a_tool_is_called(tools_llm: BlendLLM) -> None:
    answer = tools_llm.predict_and_call([WEATHER], ASKED, tool_required=True)
    assert (answer.response, answer.sources[0].tool_name) == ("rain", "weather")


def test_a_model_that_may_choose_may_answer(tools_llm: BlendLLM) -> None:
    history = [ChatMessage(role="user", content=ASKED)]
    response = tools_llm.chat_with_tools([WEATHER], chat_history=history, max_tokens=4)
    assert response.message.content
    assert len(history) == 1
    assert tools_llm.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
    with pytest.raises(ValueError, match="tool_required=True"):
        tools_llm.get_tool_calls_from_response(response)


def test_one_call_counts_unless_several_may_be_made(tools_llm: BlendLLM) -> None:
    calls = [ToolCall(str(number), "weather", "{}") for number in range(2)]
    response = ChatResponse(message=to_message("Look.", calls))
    kept = tools_llm._validate_chat_with_tools_response(response.model_copy(deep=True), [WEATHER], True)
    assert len(tools_llm.get_tool_calls_from_response(kept)) == 2
    kept = tools_llm._validate_chat_with_tools_response(response, [WEATHER])
    assert [call.tool_id for call in tools_llm.get_tool_calls_from_response(kept)] == ["0"]
    assert len(kept.message.additional_kwargs["tool_calls"]) == 1
    assert kept.message.content == "Look."


def test_arguments_that_are_incomplete_are_read_as_far_as_they_go(tools_llm: BlendLLM) -> None:
    message = to_message("", [ToolCall("1", "weather", '{"place": "Arlon", "n'), ToolCall("2", "weather", "nonsense")])
    calls = tools_llm.get_tool_calls_from_response(ChatResponse(message=message))
    assert [call.tool_kwargs for call in calls] == [{"place": "Arlon"}, {}]


async def test_an_agent_calls_its_tools(tools_llm: BlendLLM, exchanges: list[Exchange],
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(WEATHER.metadata), "get_parameters_dict", lambda _: SMALL)
    agent = FunctionAgent(tools=[WEATHER], llm=tools_llm, initial_tool_choice="weather", streaming=True)
    answer = await agent.run(ASKED)
    assert answer.tool_calls[0].tool_output.content == "rain"
    assert "<|im_start|>tool\nrain<|im_end|>" in exchanges[-1].prompt


async def test_objects_are_held_to_their_schema(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = BlendLLM(engine=engine, temperature=0, max_tokens=16)
    monkeypatch.setattr(Place, "model_json_schema", lambda *_args, **_kwargs: SMALL)
    prompt = PromptTemplate("How large is {city}?")
    found = llm.structured_predict(Place, prompt, city="Arlon")
    assert isinstance(found, Place)
    assert await llm.astructured_predict(Place, prompt, city="Arlon") == found
    *_, last = llm.stream_structured_predict(Place, prompt, city="Arlon")
    assert last == found
    *_, last = [one async for one in await llm.astream_structured_predict(Place, prompt, city="Arlon")]
    assert last == found
    response = llm.as_structured_llm(Place).chat([ChatMessage(role="user", content="How large is Arlon?")])
    assert response.raw == found
    assert json.loads(llm.complete("A size: ", response_format={"type": "json_schema", "json_schema": {
        "name": "Place", "schema": SMALL}}).text)["size"] in range(10)


@pytest.mark.usefixtures("forced")
def test_objects_by_tool_calls_where_that_is_asked_for(tools_llm: BlendLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools_llm, "pydantic_program_mode", PydanticProgramMode.FUNCTION)
    assert isinstance(tools_llm.structured_predict(Place, PromptTemplate("How large is Arlon?")), Place)


def test_forms_that_exclude_each_other_are_refused(tools_llm: BlendLLM) -> None:
    with pytest.raises(ConfigError, match="leave response_format out"):
        tools_llm.chat_with_tools([WEATHER], ASKED, tool_required=True, response_format={"type": "json_object"})
    with pytest.raises(ConfigError, match="response_format is not"):
        tools_llm.complete(ASKED, response_format={"type": "poem"})


def test_messages_reach_the_template_with_all_that_it_reads() -> None:
    call = ToolCallBlock(tool_call_id="7", tool_name="weather", tool_kwargs={"size": 1})
    rows = to_rows([
        ChatMessage(role="user", blocks=[TextBlock(text="a"), CachePoint(cache_control=CacheControl(type="ephemeral")),
                                         TextBlock(text="b")]),
        ChatMessage(role="assistant", blocks=[ThinkingBlock(content="Hm."), call]),
        ChatMessage(role="tool", content="rain", additional_kwargs={"tool_call_id": "7", "name": "weather"}),
        ChatMessage(role="chatbot", content="Rain."),
        to_message("", [ToolCall("8", "weather", '{"size": 2}')]),
    ])
    function = {"name": "weather", "arguments": {"size": 1}}
    assert rows[:4] == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.",
         "tool_calls": [{"id": "7", "type": "function", "function": function}]},
        {"role": "tool", "content": "rain", "tool_call_id": "7", "name": "weather"},
        {"role": "assistant", "content": "Rain."},
    ]
    assert rows[4]["tool_calls"] == [{"id": "8", "type": "function",
                                      "function": {"name": "weather", "arguments": {"size": 2}}}]


@pytest.mark.parametrize(("choice", "required", "expected"), [
    (None, False, "auto"), (None, True, "required"), ("auto", True, "required"), ("any", False, "required"),
    ("none", True, "none"), ("a", False, "a"), ({"type": "function", "function": {"name": "b"}}, False, "b"),
])
def test_choices_of_tools(choice: Any, required: bool, expected: str) -> None:
    assert tool_choice_of(choice, required, ["a", "b"]) == expected
    assert tool_choice_of(None, True, ["a"]) == "a"
