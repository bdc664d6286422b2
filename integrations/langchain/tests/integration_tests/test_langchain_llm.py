"""`BlendLLM` on a real engine."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from blendrag import BlendEngine
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate

from langchain_blendrag import BlendLLM, format_documents, llms

from .engine_state import looks_until

QUESTION = "The capital of France is"


@pytest.fixture
def engine(smollm2_engine: BlendEngine) -> BlendEngine:
    """One that writes what makes sense."""
    return smollm2_engine


@pytest.fixture
def llm(engine: BlendEngine) -> BlendLLM:
    return BlendLLM(engine=engine, temperature=0, max_tokens=8)


@pytest.fixture
def calls(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """The prompts of each call of `BlendEngine.generate`, which still runs."""
    seen: list[list[Any]] = []
    generate = engine.generate

    def spy(prompts: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(list(prompts))
        return generate(prompts, *args, **kwargs)

    monkeypatch.setattr(engine, "generate", spy)
    return seen


def test_text_is_completed(llm: BlendLLM) -> None:
    assert llm.invoke(QUESTION).startswith(" Paris")


def test_a_batch_is_one_engine_call(llm: BlendLLM, calls: list[list[Any]]) -> None:
    prompts = [QUESTION, "One, two, three,", QUESTION]
    answers = llm.batch(prompts)
    assert [len(call) for call in calls] == [3]
    assert answers[0] == answers[2] != answers[1]
    assert answers[0] == llm.invoke(QUESTION)


def test_results_say_how_they_ended_and_what_they_used(llm: BlendLLM) -> None:
    result = llm.generate([QUESTION, "One, two, three,"], max_tokens=3)
    usage = result.llm_output["token_usage"] if result.llm_output else {}
    expected = sum(llm.get_num_tokens(prompt) for prompt in (QUESTION, "One, two, three,"))
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (expected, 6, expected + 6)
    for [generation] in result.generations:
        info = generation.generation_info or {}
        assert info["finish_reason"] == "length"
        assert info["blend"]["chunks_found"] == 0


def test_several_answers_to_a_prompt(llm: BlendLLM) -> None:
    [candidates] = llm.generate([QUESTION], n=3, temperature=1.0, seed=7).generations
    assert len(candidates) == 3


def test_stops_of_constructor_and_call_both_count(engine: BlendEngine) -> None:
    llm = BlendLLM(engine=engine, temperature=0, max_tokens=40, stop=[" 7"])
    count = "Count: 1, 2, 3, 4, 5,"
    assert "9" in BlendLLM(engine=engine, temperature=0, max_tokens=40).invoke(count)
    assert llm.invoke(count).strip() == "6,"
    assert llm.invoke(count, stop=[" 8"]).strip() == "6,"
    assert llm.invoke(count, stop=[" 6"]).strip() == ""
    assert "".join(BlendLLM(engine=engine, temperature=0).stream(count, stop=["7, 8"])).strip() == "6,"


def test_streaming_gives_the_same_text_token_by_token(llm: BlendLLM) -> None:
    class Tokens(BaseCallbackHandler):
        def __init__(self) -> None:
            self.tokens: list[str] = []
            self.infos: list[Any] = []

        def on_llm_new_token(self, token: str, *, chunk: Any = None, **_: Any) -> None:
            self.tokens.append(token)
            self.infos.append(chunk.generation_info)

    handler = Tokens()
    pieces = list(llm.stream(QUESTION, {"callbacks": [handler]}))
    assert "".join(pieces) == llm.invoke(QUESTION)
    assert len(pieces) > 4
    assert handler.tokens == pieces
    assert [info is None for info in handler.infos] == [True] * (len(pieces) - 1) + [False]
    assert handler.infos[-1]["finish_reason"] == "length"


async def test_async_twins_answer_alike_and_leave_the_loop_free(llm: BlendLLM) -> None:
    expected = llm.batch([QUESTION, "One, two, three,"])
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counter = asyncio.ensure_future(count())
    assert await llm.ainvoke(QUESTION) == expected[0]
    assert await llm.abatch([QUESTION, "One, two, three,"]) == expected
    assert "".join([piece async for piece in llm.astream(QUESTION)]) == expected[0]
    counter.cancel()
    assert turns > 100


async def test_cancelled_work_stops_in_the_engine(engine: BlendEngine) -> None:
    llm = BlendLLM(engine=engine, temperature=0, max_tokens=1500, sampling_args={"ignore_eos": True})
    stream = llm.astream(QUESTION)
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    task = asyncio.ensure_future(llm.ainvoke(QUESTION))
    await asyncio.to_thread(looks_until, engine, lambda running: running > 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    looks = await asyncio.to_thread(looks_until, engine, lambda running: running == 0)
    assert looks < 300


def test_messages_go_through_the_chat_template(llm: BlendLLM) -> None:
    messages = [SystemMessage("You are brief."), HumanMessage("Hello")]
    rendered = ("<|im_start|>system\nYou are brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
                "<|im_start|>assistant\n")
    prompt = llm.to_prompt(ChatPromptTemplate.from_messages(messages).invoke({}))
    assert (prompt.text, prompt.add_special_tokens) == (rendered, False)
    assert llm.invoke(messages) == llm.invoke(rendered)
    assert "".join(llm.stream(messages)) == llm.batch([messages])[0] == llm.invoke(rendered)


async def test_messages_go_through_the_chat_template_async(llm: BlendLLM) -> None:
    messages = [SystemMessage("You are brief."), HumanMessage("Hello")]
    expected = llm.invoke(messages)
    assert await llm.ainvoke(messages) == expected
    assert "".join([piece async for piece in llm.astream(messages)]) == expected


def test_the_log_says_once_how_to_turn_the_chat_template_off(engine: BlendEngine,
                                                             caplog: pytest.LogCaptureFixture) -> None:
    llms._tell_once.cache_clear()
    llm = BlendLLM(engine=engine)
    with caplog.at_level(logging.INFO, "langchain_blendrag"):
        llm.to_prompt("Hello")
        assert not caplog.records
        for _ in range(2):
            llm.to_prompt([HumanMessage("Hello")])
    assert [record.getMessage().split("; ")[1] for record in caplog.records] == [
        'BlendLLM(chat_template=None) sends them as plain "Human: ..." text']


def test_the_chat_template_can_be_replaced_and_turned_off(engine: BlendEngine) -> None:
    messages = [SystemMessage("You are brief."), HumanMessage("Hello")]
    off = BlendLLM(engine=engine, chat_template=None).to_prompt(messages)
    assert (off.text, off.add_special_tokens) == ("System: You are brief.\nHuman: Hello", True)
    own = BlendLLM(engine=engine, chat_template="{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    assert own.to_prompt(messages).text == "[system]You are brief.[user]Hello"
    assert BlendLLM(engine=engine).to_prompt("Human: Hello").text == "Human: Hello"


def test_chunks_survive_an_ordinary_prompt_template(llm: BlendLLM, documents: list[Document]) -> None:
    template = PromptTemplate.from_template("Passages:\n{context}\nQuestion: {question}")
    prompt = llm.to_prompt(template.invoke({"context": format_documents(documents), "question": "Where?"}))
    assert prompt.chunks == [document.page_content for document in documents]
    assert prompt.prefix == "Passages:\n"


def test_a_cache_never_gives_another_models_answer(engine: BlendEngine, calls: list[list[Any]]) -> None:
    cache = InMemoryCache()
    llm = BlendLLM(engine=engine, temperature=0, max_tokens=3, cache=cache)
    assert llm.invoke(QUESTION) == llm.invoke(QUESTION)
    assert len(calls) == 1
    llm.bind(policy="full").invoke(QUESTION)
    assert len(calls) == 2
    BlendLLM(engine=engine, temperature=0, max_tokens=5, cache=cache).invoke(QUESTION)
    assert len(calls) == 3


def test_tokens_are_the_models_own(llm: BlendLLM, engine: BlendEngine) -> None:
    text = "Antidisestablishmentarianism, naïvely"
    assert llm.get_token_ids(text) == engine.tokenizer.encode(text, add_special_tokens=False)
    assert llm.get_num_tokens(text) == len(llm.get_token_ids(text))
