"""Tool calls of `BlendChatGenerator`, alone and in an `Agent`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from blendrag import BlendEngine
from blendrag.errors import PromptError
from haystack.components.agents import Agent
from haystack.dataclasses import ChatMessage, StreamingChunk, ToolCall
from haystack.tools import Toolset, tool

from haystack_integrations.components.generators.blendrag import BlendChatGenerator

SHOWING_TOOLS = """{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor
%}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
QUESTION = [ChatMessage.from_user("What is the weather in Arlon?")]


@tool
def weather(place: Annotated[Literal["Arlon", "Basel"], "the city"]) -> str:
    """Tells the weather."""
    return f"It rains in {place}."


@pytest.fixture
def caller(engine: BlendEngine) -> BlendChatGenerator:
    """Has to call the tool."""
    kwargs = {"temperature": 0, "max_tokens": 20, "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    return BlendChatGenerator(engine=engine, tools=[weather], chat_template=SHOWING_TOOLS, generation_kwargs=kwargs)


def facts(message: ChatMessage) -> Any:
    return message.text, [(call.tool_name, call.arguments) for call in message.tool_calls]


def test_a_tool_is_called(caller: BlendChatGenerator) -> None:
    [message] = caller.run(QUESTION)["replies"]
    assert message.text is None
    [call] = message.tool_calls
    assert (call.tool_name, list(call.arguments)) == ("weather", ["place"])
    assert call.arguments["place"] in ("Arlon", "Basel")
    assert call.id
    assert message.meta["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("tools", [Toolset([weather]), [Toolset([weather])]])
def test_toolsets_are_shown_as_tools_are(caller: BlendChatGenerator, tools: Any) -> None:
    shown = caller.to_prompt(QUESTION).text
    assert '"description": "Tells the weather."' in shown
    assert caller.to_prompt(QUESTION, tools=tools).text == shown
    assert "weather." not in caller.to_prompt(QUESTION, tools=[], generation_kwargs={"tool_choice": "none"}).text


async def test_a_stream_tells_the_call_in_pieces(caller: BlendChatGenerator) -> None:
    chunks: list[StreamingChunk] = []
    [message] = (await caller.run_async(QUESTION, chunks.append))["replies"]
    deltas = [delta for chunk in chunks for delta in chunk.tool_calls or []]
    assert (deltas[0].tool_name, deltas[0].id) == ("weather", message.tool_calls[0].id)
    assert len(deltas) > 1
    assert facts(message) == facts(caller.run(QUESTION)["replies"][0])
    assert (chunks[0].start, chunks[-1].finish_reason) == (True, "tool_calls")


def test_arguments_that_are_cut_short_are_left_out(caller: BlendChatGenerator,
                                                   caplog: pytest.LogCaptureFixture) -> None:
    [message] = caller.run(QUESTION, generation_kwargs={"max_tokens": 3})["replies"]
    assert message.tool_calls == []
    assert message.meta["finish_reason"] == "length"
    assert "Raise max_tokens" in caplog.text


def test_answers_of_tools_reach_the_model(caller: BlendChatGenerator) -> None:
    call = ToolCall(id="1", tool_name="weather", arguments={"place": "Arlon"})
    turns = [*QUESTION, ChatMessage.from_assistant(tool_calls=[call]), ChatMessage.from_tool("It rains.", origin=call)]
    text = caller.to_prompt(turns, generation_kwargs={"tool_choice": "none"}).text
    assert '<tool_call>{"name": "weather", "arguments": {"place": "Arlon"}}</tool_call>' in text
    assert "<|im_start|>tool\nIt rains.<|im_end|>" in text


async def test_an_agent_calls_its_tool_and_reads_the_answer(caller: BlendChatGenerator) -> None:
    agent = Agent(chat_generator=caller, tools=[weather], max_agent_steps=2, exit_conditions=["text"])
    messages = (await agent.run_async(messages=QUESTION))["messages"]
    assert [message.role.value for message in messages] == ["user", "assistant", "tool", "assistant", "tool"]
    assert messages[2].tool_call_results[0].result.startswith("It rains in")
    again = Agent(chat_generator=caller, tools=[weather], exit_conditions=["weather"]).run(messages=QUESTION)
    assert list(map(facts, again["messages"])) == list(map(facts, messages[:3]))


def test_what_cannot_be_called_is_refused(caller: BlendChatGenerator, engine: BlendEngine) -> None:
    with pytest.raises(ValueError, match="Duplicate tool names"):
        BlendChatGenerator("m", tools=[weather, weather])
    with pytest.raises(PromptError, match="does not show tools"):
        BlendChatGenerator(engine=engine, tools=[weather]).run(QUESTION)
    with pytest.raises(PromptError, match="none of the tools"):
        caller.run(QUESTION, generation_kwargs={"tool_choice": "time"})
