"""LlamaIndex's `BlendLLM` on a real engine, alone and in query engines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from blendrag import BlendConfig, BlendEngine, mark_chunks
from blendrag.errors import ConfigError, PromptError
from llama_index.core import MockEmbedding, SummaryIndex, VectorStoreIndex
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.schema import TextNode

from llama_index.llms.blendrag import BlendLLM

QUESTION = "The capital of France is"
CHAT = [ChatMessage(role="system", content="You are brief."), ChatMessage(role="user", content="Say hello.")]
RENDERED = ("<|im_start|>system\nYou are brief.<|im_end|>\n<|im_start|>user\nSay hello.<|im_end|>\n"
            "<|im_start|>assistant\n")


@pytest.fixture
def passages() -> list[str]:
    """Three short passages, each long enough to be stored."""
    rivers = {"Arlon": "Semois", "Basel": "Rhine", "Dresden": "Elbe"}
    return [f"The city of {city} lies on the river {river}. It has a cathedral, a market square, two bridges and a "
            "museum of modern art." for city, river in rivers.items()]


@pytest.fixture
def llm(engine: BlendEngine) -> BlendLLM:
    return BlendLLM(engine=engine, temperature=0, max_tokens=8)


def test_it_is_a_llama_index_model() -> None:
    assert BaseLLM in BlendLLM.__mro__
    assert BlendLLM.class_name() == "BlendLLM"


def test_construction_starts_nothing_and_serialises() -> None:
    llm = BlendLLM("no/such-model", config={"ratio": 0.3}, engine_args={"max_model_len": 99})
    assert llm.config == BlendConfig(ratio=0.3)
    back = BlendLLM.from_dict(llm.to_dict())
    assert back.to_dict() == llm.to_dict()
    assert back.engine is llm.engine


def test_a_closed_engine_is_replaced() -> None:
    llm = BlendLLM("no/such-model", engine_args={"max_model_len": 98})
    before = llm.engine
    llm.close()
    assert llm.engine is not before


@pytest.mark.parametrize(("arguments", "message"), [
    ({}, "needs a model"),
    ({"model": "m", "max_model_len": 5}, "no argument 'max_model_len'.*engine_args"),
    ({"model": "m", "engine": BlendEngine("m")}, "leave them out"),
    ({"model": "m", "config": {"policy": "best"}}, "there is no policy 'best'"),
])
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BlendLLM(**arguments)


def test_metadata_is_the_engines(llm: BlendLLM, engine: BlendEngine) -> None:
    metadata = llm.metadata
    assert (metadata.context_window, metadata.num_output) == (engine.max_model_len, 8)
    assert metadata.is_chat_model
    assert metadata.model_name == engine.model


def test_completion_and_chat(llm: BlendLLM) -> None:
    completed = llm.complete(QUESTION)
    assert completed.text.startswith(" Paris")
    assert completed.raw["usage"]["completion_tokens"] == 8
    assert completed.raw["finish_reason"] == "length"
    assert str(llm.chat(CHAT).message.content) == llm.complete(RENDERED).text


def test_streams_grow_token_by_token(llm: BlendLLM) -> None:
    pieces = list(llm.stream_complete(QUESTION))
    assert "".join(piece.delta or "" for piece in pieces) == pieces[-1].text == llm.complete(QUESTION).text
    assert len(pieces) > 4
    assert [piece.raw is None for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    said = list(llm.stream_chat(CHAT))
    assert "".join(piece.delta or "" for piece in said) == said[-1].message.content == llm.chat(CHAT).message.content
    assert said[-1].raw["usage"]["prompt_tokens"] > 0


async def test_async_twins_answer_alike_and_leave_the_loop_free(llm: BlendLLM) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counter = asyncio.ensure_future(count())
    completed, chatted = (await llm.acomplete(QUESTION)).text, (await llm.achat(CHAT)).message.content
    pieces = [piece async for piece in await llm.astream_complete(QUESTION)]
    said = [piece async for piece in await llm.astream_chat(CHAT)]
    counter.cancel()
    assert turns > 100
    assert completed == pieces[-1].text == llm.complete(QUESTION).text
    assert chatted == said[-1].message.content == llm.chat(CHAT).message.content


def test_arguments_of_a_call(llm: BlendLLM) -> None:
    assert llm.complete(QUESTION, max_tokens=2).raw["usage"]["completion_tokens"] == 2
    assert llm.complete("Count: 1, 2, 3, 4, 5,", stop=[" 7"]).text == " 6,"
    assert llm.complete(QUESTION, blend=False).raw["blend"]["policy"] == "plain"
    with pytest.raises(ConfigError, match="no argument 'best_of'"):
        llm.complete(QUESTION, best_of=2)


def test_stored_chunks_are_reused_and_counted(llm: BlendLLM, engine: BlendEngine, passages: list[str]) -> None:
    engine.encode(passages)
    question = f"Answer from these.\n{mark_chunks(passages)}\nOn which river does Dresden lie?"
    raw = llm.chat([ChatMessage(role="user", content=question)]).raw
    assert raw["blend"]["chunks_reused"] == 3
    assert raw["usage"]["prompt_tokens_details"]["cached_tokens"] == raw["blend"]["reused_tokens"] > 0
    assert llm.complete(question).raw["blend"]["chunks_reused"] == 3


def test_token_counting_sees_the_usage(engine: BlendEngine) -> None:
    counter = TokenCountingHandler()
    llm = BlendLLM(engine=engine, max_tokens=3, callback_manager=CallbackManager([counter]))
    usage = llm.complete(QUESTION).raw["usage"]
    assert counter.prompt_llm_token_count == usage["prompt_tokens"]
    assert counter.completion_llm_token_count == usage["completion_tokens"]


def test_what_the_model_cannot_read_is_refused(llm: BlendLLM) -> None:
    with pytest.raises(PromptError, match="reads text only"):
        llm.chat([ChatMessage(role="user", blocks=[TextBlock(text="What?"), ImageBlock(image=b"AAAA")])])


@pytest.mark.parametrize("mode", [ResponseMode.COMPACT, ResponseMode.REFINE, ResponseMode.TREE_SUMMARIZE])
def test_stock_query_engines_answer(llm: BlendLLM, passages: list[str], mode: ResponseMode) -> None:
    index = SummaryIndex([TextNode(text=passage) for passage in passages])
    answer = index.as_query_engine(llm=llm, response_mode=mode).query("On which river does Dresden lie?")
    assert str(answer).strip()


async def test_streaming_and_async_query_engines_answer_alike(llm: BlendLLM, passages: list[str]) -> None:
    index = VectorStoreIndex([TextNode(text=passage) for passage in passages], embed_model=MockEmbedding(8))
    question = "On which river does Dresden lie?"
    expected = str(index.as_query_engine(llm=llm).query(question))
    streamed: Any = index.as_query_engine(llm=llm, streaming=True).query(question)
    assert "".join(streamed.response_gen) == expected
    assert str(await index.as_query_engine(llm=llm).aquery(question)) == expected
