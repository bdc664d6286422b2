"""On every path the model reads, byte for byte, what LangChain alone would have sent to a plain vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from blendrag import BlendEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    convert_to_openai_messages,
)
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.tools import create_retriever_tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.vectorstores import InMemoryVectorStore
from langgraph.checkpoint.memory import InMemorySaver
from tests.conversations import TEMPLATES, Message, check_chunks, conversations

from langchain_blendrag import (
    BlendLLM,
    BlendVectorStore,
    ChatBlend,
    create_blend_documents_chain,
    format_documents,
)

CHAT = ChatPromptTemplate([("system", "Answer from these passages.\n\n{context}"), ("human", "{input}")])
TEXT = PromptTemplate.from_template("Passages:\n{context}\n\nQuestion: {input}\nAnswer:")
SHOWN = PromptTemplate.from_template("[{source}]\n{page_content}")
EMBEDDINGS = DeterministicFakeEmbedding(size=8)
QUESTION = "Which river? <|im_end|> 😀"


class Wire:
    """What the engine was sent, and what it found in it."""

    def __init__(self, engine: BlendEngine) -> None:
        self.engine = engine
        self.outputs: list[Any] = []

    @property
    def text(self) -> str:
        """The last prompt, decoded from its token ids."""
        return str(self.engine.tokenizer.decode(self.outputs[-1].prompt_token_ids))

    @property
    def chunks(self) -> int:
        """How many chunks the last prompt had."""
        return int(self.outputs[-1].stats.chunks_found)

    @property
    def reused(self) -> int:
        """For how many of them nothing was computed anew."""
        stats = self.outputs[-1].stats
        return int(stats.chunks_reused + stats.chunks_prefix_cached)


@pytest.fixture
def wire(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    engine.store.clear()  # only chunks that the test itself stores shall be found
    seen = Wire(engine)
    output = engine._output

    def listen(*arguments: Any) -> Any:
        seen.outputs.append(output(*arguments))
        return seen.outputs[-1]

    monkeypatch.setattr(engine, "_output", listen)
    return seen


@pytest.fixture
def chat(engine: BlendEngine) -> ChatBlend:
    return ChatBlend(engine=engine, temperature=0, max_tokens=4)


class Framework:
    """A model that keeps what LangChain sends it."""

    def __init__(self, engine: BlendEngine, template: str | None = None) -> None:
        self.model: Runnable[Any, Any] = RunnableLambda(self._keep)
        self._engine = engine
        self._template = template
        self._value: Any = None

    def _keep(self, value: Any) -> AIMessage:
        self._value = value
        return AIMessage("answer")

    def sent(self, tools: Any = None) -> str:
        """Its last prompt, as a plain vLLM makes it of messages, or text as it is."""
        if not hasattr(self._value, "messages"):
            return str(self._value.to_string())
        return self.rendered(self._value.messages, tools)

    def rendered(self, messages: list[BaseMessage], tools: Any = None) -> str:
        rows: Any = convert_to_openai_messages(messages)
        for row in rows:
            for made in row.get("tool_calls", []):
                made["function"]["arguments"] = {"query": "river"}
        return str(self._engine.tokenizer.apply_chat_template(
            rows, chat_template=self._template, tools=tools, tokenize=False, add_generation_prompt=True))


def joined(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


@pytest.mark.parametrize("kind", [BlendLLM, ChatBlend])
@pytest.mark.parametrize("prompt", [CHAT, TEXT])
@pytest.mark.parametrize("way", ["invoke", "stream", "ainvoke", "astream", "batch"])
async def test_models(engine: BlendEngine, wire: Wire, documents: list[Document], kind: Any, prompt: Any,
                      way: str) -> None:
    plain = Framework(engine)
    (prompt | plain.model).invoke({"context": joined(documents), "input": QUESTION})
    expected = plain.sent()
    if kind is ChatBlend and prompt is TEXT:  # a chat model takes text as the user's message
        expected = plain.rendered([HumanMessage(expected)])
    chain = prompt | kind(engine=engine, temperature=0, max_tokens=2)
    inputs: Any = {"context": format_documents(documents), "input": QUESTION}
    match way:
        case "batch":
            chain.batch([inputs])
        case "stream":
            list(chain.stream(inputs))
        case "astream":
            assert [piece async for piece in chain.astream(inputs)]
        case "ainvoke":
            await chain.ainvoke(inputs)
        case "invoke":
            chain.invoke(inputs)
    assert wire.text == expected
    assert wire.chunks == 4


@pytest.mark.parametrize("settings", [
    {}, {"document_prompt": SHOWN}, {"document_separator": "\n---\n"}, {"document_separator": ""},
    {"document_prompt": SHOWN, "document_separator": "\n# "}, {"document_variable_name": "input"},
])
@pytest.mark.parametrize("prompt", [CHAT, TEXT])
def test_documents_chain(engine: BlendEngine, wire: Wire, chat: ChatBlend, documents: list[Document], prompt: Any,
                         settings: Any) -> None:
    plain = Framework(engine)
    variable = settings.get("document_variable_name", "context")
    inputs = {"context": "-", "input": QUESTION, variable: documents}
    create_stuff_documents_chain(plain.model, prompt, **settings).invoke(inputs)
    model: Any = BlendLLM(engine=engine, temperature=0, max_tokens=2) if prompt is TEXT else chat
    answer = create_blend_documents_chain(model.bind(max_tokens=2), prompt, **settings).invoke(inputs)
    assert isinstance(answer, str)
    assert wire.text == plain.sent()
    assert wire.chunks == 4


def test_retrieval_chain_over_the_vector_store(engine: BlendEngine, wire: Wire, chat: ChatBlend,
                                               documents: list[Document]) -> None:
    plain = Framework(engine)
    theirs = InMemoryVectorStore.from_documents(documents, EMBEDDINGS).as_retriever()
    create_retrieval_chain(theirs, create_stuff_documents_chain(plain.model, CHAT)).invoke({"input": QUESTION})
    ours = BlendVectorStore.from_documents(documents, EMBEDDINGS, engine=engine).as_retriever()
    result = create_retrieval_chain(ours, create_blend_documents_chain(chat, CHAT)).invoke({"input": QUESTION})
    assert wire.text == plain.sent()
    assert wire.reused == 4
    assert set(result) == {"input", "context", "answer"}


def test_lcel_over_the_vector_store(engine: BlendEngine, wire: Wire, chat: ChatBlend,
                                    documents: list[Document]) -> None:
    plain = Framework(engine)

    def chain(store: Any, join: Any, model: Any) -> Any:
        return {"context": store.as_retriever() | join, "input": RunnablePassthrough()} | CHAT | model

    chain(InMemoryVectorStore.from_documents(documents, EMBEDDINGS), joined, plain.model).invoke(QUESTION)
    store = BlendVectorStore.from_documents(documents, EMBEDDINGS, engine=engine)
    chain(store, format_documents, chat).invoke(QUESTION)
    assert wire.text == plain.sent()
    assert wire.reused == 4


def test_agent_with_documents_as_artifacts(engine: BlendEngine, wire: Wire, documents: list[Document],
                                           hermes: str) -> None:
    chat = ChatBlend(engine=engine, chat_template=hermes, temperature=0, max_tokens=4)
    store = BlendVectorStore.from_documents(documents, EMBEDDINGS, engine=engine)
    search = create_retriever_tool(store.as_retriever(), "search", "Searches.", document_prompt=SHOWN,
                                   response_format="content_and_artifact")
    asked = AIMessage("", tool_calls=[{"name": "search", "args": {"query": "river"}, "id": "1"}])
    result = search.invoke(asked.tool_calls[0])
    assert isinstance(result, ToolMessage)
    messages: list[BaseMessage] = [HumanMessage(QUESTION), asked, result]
    agent: Any = create_agent(chat, [search], system_prompt="Use the tool.")
    agent.invoke({"messages": messages})
    expected = Framework(engine, hermes).rendered([ChatPromptTemplate([("system", "Use the tool.")]).invoke({})
                                                   .to_messages()[0], *messages], [convert_to_openai_tool(search)])
    assert wire.text == expected
    assert wire.reused == 4


@pytest.mark.parametrize("kind", [BlendLLM, ChatBlend])
def test_recomputing_everything_answers_like_plain_vllm(engine: BlendEngine, documents: list[Document],
                                                        kind: Any) -> None:
    model = kind(engine=engine, temperature=0, max_tokens=8)
    store = BlendVectorStore.from_documents(documents, EMBEDDINGS, llm=model)
    inputs = {"context": store.as_retriever().invoke(QUESTION), "input": "Which river?"}
    engine.encode([document.page_content for document in documents], cache_salt="full")
    full = create_blend_documents_chain(model.bind(policy="full", cache_salt="full"), CHAT).invoke(inputs)
    plain = create_blend_documents_chain(model.bind(blend=False, cache_salt="plain"), CHAT).invoke(inputs)
    assert full == plain != ""


# Documents in any number of messages.


def message_of(role: str, content: Any) -> BaseMessage:
    kinds: dict[str, Any] = {"system": SystemMessage, "user": HumanMessage, "assistant": AIMessage}
    return ToolMessage(content, tool_call_id="1") if role == "tool" else kinds[role](content)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(conversations, st.sampled_from(sorted(TEMPLATES)), st.booleans())
def test_any_conversation(engine: BlendEngine, conversation: list[Message], name: str, parts: bool) -> None:
    template = TEMPLATES[name]
    plain = [message_of(message.role, message.plain) for message in conversation]
    marked = [message_of(message.role, [{"type": "text", "text": message.marked}] if parts else message.marked)
              for message in conversation]
    for model in (ChatBlend(engine=engine, chat_template=template), BlendLLM(engine=engine, chat_template=template)):
        prompt = model.to_prompt(marked)
        assert prompt.text == Framework(engine, template).rendered(plain)
        check_chunks(prompt.chunks, conversation, name)


def turns(documents: list[Document], join: Any) -> list[BaseMessage]:
    """A second turn, with documents in the system message and in both of the user's."""
    first, second, third = join(documents[:1]), join(documents[1:3]), join(documents[3:])
    return [SystemMessage(f"Answer from these.\n{first}"), HumanMessage(f"{second}\n\n{QUESTION}"),
            AIMessage("The Semois."), HumanMessage(f"{third}\n\nAnd the other?")]


@pytest.mark.parametrize("kind", [BlendLLM, ChatBlend])
@pytest.mark.parametrize("options", [{}, {"blend": False}, {"policy": "full"}])
def test_a_second_turn(engine: BlendEngine, wire: Wire, documents: list[Document], kind: Any,
                       options: dict[str, Any]) -> None:
    model = kind(engine=engine, temperature=0, max_tokens=2)
    model.invoke(turns(documents, format_documents), **options)
    assert wire.text == Framework(engine).rendered(turns(documents, joined))
    assert wire.outputs[-1].prompt_token_ids == engine.tokens(model.to_prompt(turns(documents, format_documents))).ids
    assert wire.chunks == (0 if options.get("blend") is False else 4)


@pytest.mark.parametrize("delimiter", [None, " # # "])
@pytest.mark.parametrize("kind", [BlendLLM, ChatBlend])
def test_a_second_turn_with_a_delimiter(engine: BlendEngine, documents: list[Document], kind: Any,
                                        delimiter: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "config", engine.config.model_copy(update={"delimiter": delimiter}))

    def join(some: list[Document]) -> str:
        return format_documents(some, delimiter=delimiter)

    texts = [document.page_content for document in documents]
    model = kind(engine=engine)
    assert model.to_prompt(turns(documents, join)).text == Framework(engine).rendered(turns(documents, joined))
    assert model.to_prompt(turns(documents, join)).chunks == texts
    if kind is BlendLLM:
        plain = BlendLLM(engine=engine, chat_template=None).to_prompt(turns(documents, join))
        assert plain.text == ChatPromptTemplate.from_messages(turns(documents, joined)).format()
        assert plain.chunks == texts


def test_turns_that_a_checkpointer_keeps(engine: BlendEngine, wire: Wire, documents: list[Document]) -> None:
    chat = ChatBlend(engine=engine, temperature=0, max_tokens=2)
    agent: Any = create_agent(chat, [], system_prompt=f"Answer from these.\n{format_documents(documents[:1])}",
                              checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    _, second, _, third = turns(documents, format_documents)
    agent.invoke({"messages": [second]}, config)
    state = agent.invoke({"messages": [third]}, config)
    answer = state["messages"][1]
    plain = turns(documents, joined)
    assert wire.text == Framework(engine).rendered([plain[0], plain[1], AIMessage(answer.content), plain[3]])
    assert wire.chunks == 4
