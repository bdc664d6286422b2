"""`ChatBlend` on a real engine."""

from __future__ import annotations

import asyncio
from functools import reduce
from operator import add
from typing import Any

import pytest
from blendrag import BlendEngine, strip_marks
from blendrag.errors import PromptError
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.documents import Document
from langchain_core.globals import set_llm_cache
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate

from langchain_blendrag import ChatBlend, format_documents

PROMPT = ChatPromptTemplate([("system", "Answer from these passages.\n{context}"), ("human", "{question}")])
QUESTION = "On which river does Dresden lie?"


@pytest.fixture
def engine(smollm2_engine: BlendEngine) -> BlendEngine:
    """One that writes what makes sense."""
    return smollm2_engine


@pytest.fixture
def chat(engine: BlendEngine) -> ChatBlend:
    return ChatBlend(engine=engine, temperature=0, max_tokens=12)


@pytest.fixture
def messages(documents: list[Document]) -> Any:
    return PROMPT.invoke({"context": format_documents(documents), "question": QUESTION})


def test_the_model_reads_what_it_would_without_us(chat: ChatBlend, engine: BlendEngine,
                                                  documents: list[Document]) -> None:
    """Byte for byte the template's text, with the documents joined as any chain joins them."""
    marked = PROMPT.invoke({"context": format_documents(documents), "question": QUESTION})
    plain = "\n\n".join(document.page_content for document in documents)
    rows = [{"role": "system", "content": f"Answer from these passages.\n{plain}"},
            {"role": "user", "content": QUESTION}]
    expected = engine.tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=True)
    [output] = engine.generate(chat.to_prompt(marked))
    assert engine.tokenizer.decode(output.prompt_token_ids) == expected
    assert chat.to_prompt(marked).chunks == [document.page_content for document in documents]
    assert strip_marks(chat.to_prompt(marked).text) == expected


def test_stored_chunks_are_reused_and_counted(chat: ChatBlend, engine: BlendEngine, documents: list[Document],
                                              messages: Any) -> None:
    engine.store.clear()
    cold = chat.invoke(messages)
    assert cold.response_metadata["blend"]["chunks_missed"] == 4
    encoded = engine.encode([document.page_content for document in documents])
    engine.reset_prefix_cache()  # what is cached and exact would be preferred
    warm = chat.invoke(messages, ratio=0.2)
    blend, usage = warm.response_metadata["blend"], warm.usage_metadata
    assert usage is not None
    details: dict[str, Any] = dict(usage["input_token_details"])
    assert blend["chunks_reused"] == 4
    assert details["cache_read"] == blend["reused_tokens"] > 0
    assert details["blend_recomputed"] == blend["recomputed_tokens"] > 0
    assert details["cache_read"] + details["blend_recomputed"] == sum(chunk.tokens for chunk in encoded)
    assert usage["input_tokens"] == chat.get_num_tokens_from_messages(messages.to_messages())
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert warm.response_metadata["model_name"] == chat.model
    assert warm.response_metadata["finish_reason"] in {"stop", "length"}


def test_recomputing_everything_answers_like_plain_vllm(chat: ChatBlend, engine: BlendEngine,
                                                        documents: list[Document], messages: Any) -> None:
    engine.encode([document.page_content for document in documents], cache_salt="full")
    full = chat.invoke(messages, policy="full", cache_salt="full")
    plain = chat.invoke(messages, blend=False, cache_salt="plain")
    assert full.content == plain.content
    assert full.response_metadata["blend"]["chunks_reused"] == 4
    assert plain.response_metadata["blend"]["policy"] == "plain"


def test_a_stream_ends_with_usage_and_statistics(chat: ChatBlend, messages: Any) -> None:
    expected = chat.invoke(messages)
    chunks = list(chat.stream(messages))
    spoken = [chunk for chunk in chunks if chunk.content]
    assert len(spoken) > 3
    assert [bool(chunk.usage_metadata) for chunk in chunks].count(True) == 1
    whole = reduce(add, chunks)
    assert isinstance(whole, AIMessageChunk)
    assert whole.content == expected.content
    assert whole.usage_metadata is not None
    assert expected.usage_metadata is not None
    assert whole.usage_metadata["total_tokens"] == expected.usage_metadata["total_tokens"]
    assert whole.response_metadata["blend"]["chunks_found"] == 4
    assert whole.response_metadata["finish_reason"] == expected.response_metadata["finish_reason"]


async def test_async_twins_answer_alike(chat: ChatBlend, messages: Any) -> None:
    expected = chat.invoke(messages)
    assert (await chat.ainvoke(messages)).content == expected.content
    whole = reduce(add, [chunk async for chunk in chat.astream(messages)])
    assert whole.content == expected.content
    assert whole.response_metadata["blend"]["chunks_found"] == 4


async def test_many_at_once_share_the_engine(chat: ChatBlend) -> None:
    words = ["red", "green", "blue", "white"]
    texts = [f"Repeat this word and nothing else: {word}" for word in words]
    alone = [chat.invoke(text).content for text in texts]
    assert [answer.content for answer in await asyncio.gather(*map(chat.ainvoke, texts))] == alone
    assert [answer.content for answer in await asyncio.to_thread(chat.batch, texts)] == alone


def test_stops_of_constructor_and_call_both_count(engine: BlendEngine, messages: Any) -> None:
    whole = str(ChatBlend(engine=engine, temperature=0, max_tokens=12).invoke(messages).content)
    first, *_, last = whole.split()
    chat = ChatBlend(engine=engine, temperature=0, max_tokens=12, stop=[last])
    assert last not in str(chat.invoke(messages).content)
    assert chat.invoke(messages, stop=[first]).content == ""
    assert chat.invoke(messages, stop=[first]).response_metadata["stop_reason"] == first


def test_usage_adds_up_over_calls(chat: ChatBlend, messages: Any) -> None:
    handler = UsageMetadataCallbackHandler()
    for _ in range(2):
        chat.invoke(messages, {"callbacks": [handler]})
    [usage] = handler.usage_metadata.values()
    once = chat.invoke(messages).usage_metadata
    assert once is not None
    assert usage["total_tokens"] == 2 * once["total_tokens"]
    details, each = dict(usage["input_token_details"]), dict(once["input_token_details"])
    assert set(details) == {"cache_read", "blend_recomputed", "blend_prefix_cached"} == set(each)


def test_a_cache_never_gives_another_models_answer(chat: ChatBlend, engine: BlendEngine,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[Any] = []
    stream = engine.stream

    def spy(prompt: Any, *args: Any, **kwargs: Any) -> Any:
        prompts.append(prompt)
        return stream(prompt, *args, **kwargs)

    monkeypatch.setattr(engine, "stream", spy)
    set_llm_cache(InMemoryCache())
    try:
        assert chat.invoke("Hello", max_tokens=2).content == chat.invoke("Hello", max_tokens=2).content
        assert len(prompts) == 1
        for count, other in enumerate([chat.bind(max_tokens=2, policy="full"), chat.bind(max_tokens=3),
                                       ChatBlend(engine=engine, temperature=0, max_tokens=2)], 2):
            other.invoke("Hello")
            assert len(prompts) == count
    finally:
        set_llm_cache(None)


def test_what_the_model_cannot_read_is_refused(chat: ChatBlend) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(PromptError, match="reads text only"):
        chat.invoke([HumanMessage([{"type": "text", "text": "What is this?"}, image])])
    strict = ChatBlend(engine=chat.engine, chat_template="{{ raise_exception('no system role') }}")
    with pytest.raises(PromptError, match="no system role"):
        strict.invoke([SystemMessage("x"), HumanMessage("y")])


def test_conversations_keep_their_roles(chat: ChatBlend) -> None:
    prompt = chat.to_prompt([SystemMessage("s"), HumanMessage("h"), AIMessage("a"), HumanMessage("again")])
    assert prompt.text.split("<|im_start|>")[1:] == [
        "system\ns<|im_end|>\n", "user\nh<|im_end|>\n", "assistant\na<|im_end|>\n", "user\nagain<|im_end|>\n",
        "assistant\n"]


def test_template_variables_reach_the_template(engine: BlendEngine) -> None:
    chat = ChatBlend(engine=engine, chat_template="{{ mood }}: {{ messages[0].content }}",
                     chat_template_kwargs={"mood": "calm"})
    assert chat.to_prompt("hello").text == "calm: hello"
