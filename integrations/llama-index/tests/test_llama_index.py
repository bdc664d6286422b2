"""LlamaIndex's `BlendLLM` on a real engine, alone and in query engines."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from blendrag import BlendConfig, BlendEngine, mark_chunks, strip_marks
from blendrag.errors import ConfigError, PromptError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_index.core import SummaryIndex
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMCompletionEndEvent
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.core.prompts import ChatPromptTemplate
from llama_index.core.schema import MetadataMode, TextNode
from llama_index_reference import Exchange, PlainLLM, Recorder
from tests.conversations import TEMPLATES, Message, check_chunks, conversations

from llama_index.llms.blendrag import BlendLLM

QUESTION = "The capital of France is"
CHAT = [ChatMessage(role="system", content="You are brief."), ChatMessage(role="user", content="Say hello.")]
EIGHT = [f"{prefix}{kind}" for prefix in ("", "a", "stream_", "astream_") for kind in ("complete", "chat")]
RENDERED = ("<|im_start|>system\nYou are brief.<|im_end|>\n<|im_start|>user\nSay hello.<|im_end|>\n"
            "<|im_start|>assistant\n")


@pytest.fixture
def engine(smollm2_engine: BlendEngine) -> BlendEngine:
    """One that writes what makes sense."""
    return smollm2_engine


@pytest.fixture
def llm(engine: BlendEngine) -> BlendLLM:
    return BlendLLM(engine=engine, temperature=0, max_tokens=8)


async def ask(llm: BlendLLM, way: str, asked: Any, **how: Any) -> Any:
    """The response, of a stream the last one, by one of LlamaIndex's eight methods."""
    response = getattr(llm, way)(asked, **how)
    if way.startswith("astream"):
        return [one async for one in await response][-1]
    if way.startswith("stream"):
        return list(response)[-1]
    return await response if way.startswith("a") else response


def test_it_is_a_llama_index_model() -> None:
    assert BaseLLM in BlendLLM.__mro__
    assert BlendLLM.class_name() == "BlendLLM"


@pytest.mark.parametrize("config", [{"ratio": 0.3}, {"policy": "query"}, {"store_path": "kv"}])
def test_construction_starts_nothing_and_serialises(config: dict[str, Any]) -> None:
    llm = BlendLLM("no/such-model", config=config, engine_args={"max_model_len": 99})
    assert llm.config == BlendConfig(**config)
    back = BlendLLM.from_dict(llm.to_dict())
    assert back.to_dict() == llm.to_dict()
    assert back.config.uses_profile == llm.config.uses_profile
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
    raw = llm.complete(question, max_tokens=1).raw
    assert raw["blend"]["chunks_reused"] == 3
    assert raw["usage"]["prompt_tokens_details"]["cached_tokens"] == raw["blend"]["reused_tokens"] > 0


@pytest.mark.parametrize("way", EIGHT)
async def test_every_method_is_transparent_and_tells_what_it_did(
        engine: BlendEngine, passages: list[str], events: Recorder, exchanges: list[Exchange], way: str) -> None:
    engine.encode(passages[:1])
    marked = mark_chunks(passages[:1]) + "\n\nThe city of Arlon lies on the river"
    counter = TokenCountingHandler()
    llm = BlendLLM(engine=engine, temperature=0, max_tokens=2, callback_manager=CallbackManager([counter]))
    chats = "chat" in way
    asked: Any = [ChatMessage(role="user", content=marked)] if chats else marked
    responses = [await ask(llm, way, asked, logprobs=1, **how) for how in ({"blend": False}, {"policy": "full"})]
    rows = [{"role": "user", "content": strip_marks(marked)}]
    sent = engine.tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=True) if chats else (
        strip_marks(marked))
    assert [exchange.prompt for exchange in exchanges] == [sent, sent]
    assert [exchange.stats.chunks_reused for exchange in exchanges] == [0, 1]
    texts = [response.message.content if chats else response.text for response in responses]
    assert texts == [exchange.answer for exchange in exchanges] == texts[::-1]
    assert [response.raw["blend"] for response in responses] == [exchange.stats.to_dict() for exchange in exchanges]
    ended = events.responses(LLMChatEndEvent if chats else LLMCompletionEndEvent)
    assert [response.raw for response in ended] == [response.raw for response in responses]
    usage = [response.raw["usage"] for response in responses]
    assert counter.prompt_llm_token_count == sum(one["prompt_tokens"] for one in usage) > 0
    assert counter.completion_llm_token_count == sum(one["completion_tokens"] for one in usage) == 4
    assert [likely.logprob <= 0 for response in responses for likely in response.logprobs[-1]] == [True] * 2


async def test_blocking_calls_work_within_a_running_loop(llm: BlendLLM) -> None:
    assert llm.chat(CHAT).message.content == (await llm.achat(CHAT)).message.content
    assert list(llm.stream_complete(QUESTION))[-1].text == llm.complete(QUESTION).text


def test_eight_threads_are_answered_at_once(llm: BlendLLM) -> None:
    asked = [f"{QUESTION}{' so' * number}" for number in range(8)]
    alone = [llm.complete(text, max_tokens=2).text for text in asked]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda text: llm.complete(text, max_tokens=2).text, asked))
    assert together == alone


def test_what_the_model_cannot_read_is_refused(llm: BlendLLM) -> None:
    with pytest.raises(PromptError, match="reads text only"):
        llm.chat([ChatMessage(role="user", blocks=[TextBlock(text="What?"), ImageBlock(image=b"AAAA")])])


def test_a_stock_query_engine_reuses_what_is_stored(llm: BlendLLM, engine: BlendEngine, nodes: list[TextNode],
                                                    exchanges: list[Exchange]) -> None:
    engine.encode([node.get_content(MetadataMode.LLM) for node in nodes])
    question = "On which river does Dresden lie?"
    answer = SummaryIndex(nodes).as_query_engine(llm=llm).query(question)
    plain = PlainLLM(engine.tokenizer, [str(answer)])
    SummaryIndex(nodes).as_query_engine(llm=plain).query(question)
    assert [exchange.prompt for exchange in exchanges] == plain.sent
    assert [exchange.stats.chunks_reused for exchange in exchanges] == [3]


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(conversations, st.sampled_from(sorted(TEMPLATES)), st.booleans())
def test_documents_in_any_conversation(engine: BlendEngine, conversation: list[Message], name: str,
                                       parts: bool) -> None:
    """The text is the template's own of the messages without marks, and chunks are the documents."""
    llm = BlendLLM(engine=engine, chat_template=TEMPLATES[name])
    marked = [ChatMessage(role=message.role, blocks=[TextBlock(text=message.marked)]) if parts else
              ChatMessage(role=message.role, content=message.marked) for message in conversation]
    prompt = llm._conversation(marked, {}).prompt
    rows = [{"role": message.role, "content": message.plain} for message in conversation]
    assert prompt.text == engine.tokenizer.apply_chat_template(rows, chat_template=TEMPLATES[name], tokenize=False,
                                                               add_generation_prompt=True)
    check_chunks(prompt.chunks, conversation, name)


@pytest.mark.parametrize("delimiter", [None, " # # "])
@pytest.mark.parametrize("chats", [True, False])
def test_documents_in_two_messages_of_a_template(engine: BlendEngine, passages: list[str], chats: bool,
                                                 delimiter: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "config", engine.config.model_copy(update={"delimiter": delimiter}))
    if not chats:
        monkeypatch.setattr(engine.tokenizer, "chat_template", None)
    template = ChatPromptTemplate.from_messages([("system", "Answer from this.\n{a}"), ("user", "{b}\n\nWhich?")])
    marked = {"a": mark_chunks(passages[:1], delimiter), "b": mark_chunks(passages[1:], delimiter)}
    prompt = BlendLLM(engine=engine).render(template, **marked)
    plain = template.format_messages(a=passages[0], b="\n\n".join(passages[1:]))
    rows = [{"role": message.role.value, "content": message.content} for message in plain]
    expected = (engine.tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=True) if chats
                else template.format(a=passages[0], b="\n\n".join(passages[1:])))
    assert prompt.text == expected
    assert prompt.chunks == passages
