"""Agents: documents in tool artifacts are reused, turn after turn."""

from __future__ import annotations

from typing import Any

import pytest
from blendrag import BlendEngine
from langchain.agents import create_agent
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
def chat(engine: BlendEngine, hermes: str) -> ChatBlend:
    return ChatBlend(engine=engine, chat_template=hermes, temperature=0, max_tokens=12)


@pytest.fixture
def search(engine: BlendEngine, documents: list[Document]) -> Any:
    texts = [Document(f"Agents' guide. {document.page_content}") for document in documents]
    store = BlendVectorStore.from_documents(texts, DeterministicFakeEmbedding(size=8), engine=engine)
    return create_retriever_tool(store.as_retriever(search_kwargs={"k": 3}), "search", "Searches the guide.",
                                 response_format="content_and_artifact")


def call(name: str, number: int, **arguments: Any) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": f"call{number}"}])


def reused(message: BaseMessage) -> tuple[int, int]:
    blend = message.response_metadata["blend"]
    return blend["chunks_found"], blend["chunks_reused"] + blend["chunks_prefix_cached"]


def test_chunks_of_artifacts_are_reused_over_several_turns(chat: ChatBlend, search: Any) -> None:
    model = chat.bind_tools([search])
    messages: list[BaseMessage] = [HumanMessage("On which river does Basel lie?")]
    for turn in (1, 2):
        asked = call("search", turn, query=f"river {turn}")
        result = search.invoke(asked.tool_calls[0])
        assert isinstance(result, ToolMessage)
        messages += [asked, result]
        answer = model.invoke(messages)
        assert reused(answer) == (3 * turn, 3 * turn)
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


def test_an_agent_calls_the_tool_and_reads_its_chunks(chat: ChatBlend, search: Any) -> None:
    """The first call is forced: a model of this size seldom calls a tool by itself."""
    first = chat.bind_tools([search], tool_choice="search", max_tokens=40)
    conversation = {"messages": [HumanMessage("On which river does Basel lie?")]}
    asked = first.invoke(conversation["messages"])
    agent: Any = create_agent(chat, [search], checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "1"}}
    result = agent.invoke({"messages": [*conversation["messages"], asked,
                                        search.invoke(asked.tool_calls[0])]}, config)
    assert reused(result["messages"][-1]) == (3, 3)
    later = agent.invoke({"messages": [HumanMessage("Are you sure?")]}, config)
    assert reused(later["messages"][-1]) == (3, 3)
    assert len(later["messages"]) == 6


async def test_an_agent_may_answer_in_a_form(chat: ChatBlend, search: Any) -> None:
    agent: Any = create_agent(chat, [search], response_format=River)
    result = await agent.ainvoke({"messages": [HumanMessage("Is the river known? Answer, do not search.")]},
                                 {"recursion_limit": 6})
    assert isinstance(result["structured_response"], River)
