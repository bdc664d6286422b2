"""Agents: documents in tool artifacts are reused, turn after turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
from blendrag import BlendEngine
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import create_retriever_tool, tool
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel

from langchain_blendrag import BlendVectorStore, ChatBlend


class River(BaseModel):
    """The answer."""

    known: bool


@pytest.fixture
def engine(smollm2_engine: BlendEngine) -> BlendEngine:
    """One that writes what makes sense."""
    return smollm2_engine


@pytest.fixture
def chat(engine: BlendEngine, hermes: str) -> ChatBlend:
    return ChatBlend(engine=engine, chat_template=hermes, temperature=0, max_tokens=12)


@pytest.fixture
def search(engine: BlendEngine, documents: list[Document]) -> Any:
    # Long ones: of the second prompt, vLLM's prefix cache holds all that precedes them.
    texts = [Document(f"Agents' guide. {document.page_content} " * 3) for document in documents]
    store = BlendVectorStore.from_documents(texts, DeterministicFakeEmbedding(size=8), engine=engine)
    return create_retriever_tool(store.as_retriever(search_kwargs={"k": 3}), "search", "Searches the guide.",
                                 response_format="content_and_artifact")


def call(tool_name: str, number: int, **arguments: Any) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": tool_name, "args": arguments, "id": f"call{number}"}])


def reused(message: BaseMessage) -> tuple[int, list[str]]:
    """How many chunks were found, and why those were computed that were."""
    blend = message.response_metadata["blend"]
    reasons = [chunk["reason"] for chunk in blend["chunks"]]
    return len(reasons), [reason for reason in reasons if reason not in ("", "prefix cached")]


def test_chunks_of_artifacts_are_reused_over_several_turns(chat: ChatBlend, search: Any) -> None:
    model = chat.bind_tools([search])
    messages: list[BaseMessage] = [HumanMessage("On which river does Basel lie?")]
    for turn in (1, 2):
        asked = call("search", turn, query=f"river {turn}")
        result = search.invoke(asked.tool_calls[0])
        assert isinstance(result, ToolMessage)
        messages += [asked, result]
        answer = model.invoke(messages)
        assert reused(answer) == (3 * turn, [])
        messages += [answer, HumanMessage("And now?")]
    assert chat.to_prompt(messages).chunks == [
        found.page_content for message in messages if isinstance(message, ToolMessage) for found in message.artifact]


def test_any_tool_may_return_documents(chat: ChatBlend, search: Any) -> None:
    @tool(response_format="content_and_artifact")
    def read(name: str) -> tuple[str, list[Document]]:
        """Reads a file."""
        found = [Document("This passage stands in the answer of the tool, word for word, between other text.")]
        return f"# {name}\n\n> {found[0].page_content}\n\nEnd of file.", found

    asked = call("read", 1, name="a.md")
    prompt = chat.to_prompt([HumanMessage("Read."), asked, read.invoke(asked.tool_calls[0])])
    assert prompt.chunks == ["This passage stands in the answer of the tool, word for word, between other text."]
    assert "# a.md\n\n> This passage" in prompt.text


@wrap_model_call
def look_up_first(request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
    """A model of this size seldom calls a tool by itself: its first step is told to."""
    return handler(request.override(tool_choice="look_up" if len(request.messages) == 1 else "none"))


def test_an_agent_calls_a_tool_and_reads_its_chunks(chat: ChatBlend, engine: BlendEngine,
                                                    documents: list[Document]) -> None:
    # Long ones: of the second prompt, vLLM's prefix cache holds all that precedes them.
    texts = [Document(f"Atlas of rivers. {document.page_content} " * 3) for document in documents]
    store = BlendVectorStore.from_documents(texts, DeterministicFakeEmbedding(size=8), engine=engine)

    @tool(response_format="content_and_artifact")
    def look_up(city: Literal["Basel", "Dresden"]) -> tuple[str, list[Document]]:
        """Looks a city up."""
        found = store.similarity_search(city, k=3)
        return "\n".join(document.page_content for document in found), found

    agent: Any = create_agent(chat, [look_up], middleware=[look_up_first], checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "1"}}
    messages = agent.invoke({"messages": [HumanMessage("On which river does Basel lie?")]}, config)["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
    assert messages[1].tool_calls[0]["args"]["city"] in {"Basel", "Dresden"}
    assert reused(messages[-1]) == (3, [])
    later = agent.invoke({"messages": [HumanMessage("Are you sure?")]}, config)["messages"]
    assert len(later) == 6
    assert reused(later[-1]) == (3, [])


async def test_an_agent_may_answer_in_a_form(engine: BlendEngine, hermes: str) -> None:
    chat = ChatBlend(engine=engine, chat_template=hermes, temperature=0, max_tokens=40)
    agent: Any = create_agent(chat, response_format=River)
    result = await agent.ainvoke({"messages": [HumanMessage("Is the river known?")]})
    assert isinstance(result["structured_response"], River)
