"""`BlendChatGenerator` on a real engine."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

import pytest
from blendrag import BlendEngine, BlendOutput
from blendrag.errors import ConfigError, PromptError
from haystack import Document
from haystack.dataclasses import ChatMessage, ImageContent, StreamingChunk, TextContent
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from tests.conversations import TEMPLATES, Message, check_chunks, conversations

from haystack_integrations.components.generators.blendrag import BlendChatGenerator

MESSAGES = [ChatMessage.from_system("You are brief."), ChatMessage.from_user("Say hello.")]
RENDERED = ("<|im_start|>system\nYou are brief.<|im_end|>\n<|im_start|>user\nSay hello.<|im_end|>\n"
            "<|im_start|>assistant\n")
LONG = {"max_tokens": 1500, "ignore_eos": True}


def reply(result: dict[str, Any]) -> ChatMessage:
    [message] = result["replies"]
    return message


def test_a_reply_and_what_it_says_of_itself(generator: BlendChatGenerator, engine: BlendEngine,
                                            answered: list[BlendOutput]) -> None:
    message = reply(generator.run(MESSAGES))
    [output] = answered
    assert engine.tokenizer.decode(output.prompt_token_ids) == RENDERED
    assert message.text == output.text != ""
    assert message.meta["model"] == engine.model
    assert (message.meta["index"], message.meta["finish_reason"]) == (0, output.finish_reason)
    assert message.meta["usage"]["prompt_tokens"] == len(output.prompt_token_ids)
    assert message.meta["usage"]["completion_tokens"] == len(output.token_ids)
    assert message.meta["blend"]["prompt_tokens"] == len(output.prompt_token_ids)


def test_a_string_is_a_message_of_the_user(generator: BlendChatGenerator) -> None:
    assert generator.to_prompt("Say hello.") == generator.to_prompt([ChatMessage.from_user("Say hello.")])
    assert generator.run([]) == {"replies": []}


def test_arguments_of_a_call_win_key_by_key(generator: BlendChatGenerator) -> None:
    one = reply(generator.run(MESSAGES, generation_kwargs={"max_completion_tokens": 1, "blend": False}))
    assert one.meta["usage"]["completion_tokens"] == 1
    assert one.meta["blend"]["policy"] == "plain"
    stopped = reply(generator.run(MESSAGES, generation_kwargs={"stop": [one.text]}))
    assert (stopped.text, stopped.meta["stop_reason"]) == (None, one.text)


async def test_several_answers_and_log_probabilities(generator: BlendChatGenerator) -> None:
    sampled = {"n": 2, "temperature": 1.0, "seed": 3, "logprobs": True, "top_logprobs": 2}
    replies = (await generator.run_async(MESSAGES, generation_kwargs=sampled))["replies"]
    assert [message.meta["index"] for message in replies] == [0, 1]
    assert replies[0].text != replies[1].text
    for message in replies:
        told = message.meta["logprobs"]["content"]
        assert "".join(entry["token"] for entry in told).startswith(message.text[:4])
        assert all(len(entry["top_logprobs"]) >= 2 for entry in told)
    with pytest.raises(ConfigError, match="n=1"):
        generator.run(MESSAGES, print, generation_kwargs=sampled)


def test_a_stream_says_the_same(generator: BlendChatGenerator) -> None:
    expected = reply(generator.run(MESSAGES, generation_kwargs={"logprobs": True}))
    chunks: list[StreamingChunk] = []
    streamed = reply(generator.run(MESSAGES, chunks.append, generation_kwargs={"logprobs": True}))
    assert "".join(chunk.content for chunk in chunks) == streamed.text == expected.text
    assert len(chunks) > 3
    assert [chunk.start for chunk in chunks[:2]] == [True, False]
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [expected.meta["finish_reason"]]
    assert chunks[-1].meta["usage"] == streamed.meta["usage"] == expected.meta["usage"]
    assert chunks[-1].meta["blend"]["prompt_tokens"] > 0
    assert not any("usage" in chunk.meta for chunk in chunks[:-1])
    told = [entry for chunk in chunks if "logprobs" in chunk.meta for entry in chunk.meta["logprobs"]["content"]]
    assert told == expected.meta["logprobs"]["content"]
    assert chunks[0].component_info is not None
    assert chunks[0].component_info.type.endswith("BlendChatGenerator")
    assert streamed.meta["completion_start_time"] == chunks[0].meta["received_at"]


async def test_async_answers_alike_with_callbacks_of_both_kinds(generator: BlendChatGenerator) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counter = asyncio.ensure_future(count())
    await generator.warm_up_async()
    expected = reply(await generator.run_async(MESSAGES))
    counter.cancel()
    assert turns > 100  # the event loop was free
    said: list[str] = []

    async def listen(chunk: StreamingChunk) -> None:
        await asyncio.sleep(0)
        said.append(chunk.content)

    assert reply(await generator.run_async(MESSAGES, listen)).text == "".join(said) == expected.text
    said.clear()
    await generator.run_async(MESSAGES, lambda chunk: said.append(chunk.content))
    assert "".join(said) == expected.text
    assert await generator.run_async([]) == {"replies": []}
    with pytest.raises(ValueError, match="coroutine"):
        generator.run(MESSAGES, listen)


async def test_cancelled_work_stops_in_the_engine(generator: BlendChatGenerator, engine: BlendEngine) -> None:
    begun = asyncio.get_running_loop().create_future()

    async def listen(chunk: StreamingChunk) -> None:
        if not begun.done():
            begun.set_result(chunk)

    task = asyncio.ensure_future(generator.run_async(MESSAGES, listen, generation_kwargs=LONG))
    await asyncio.wait({begun, task}, return_when=asyncio.FIRST_COMPLETED)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # Each look takes at least a step, so a request that went on would outlast them.
    assert await asyncio.to_thread(looks_until_idle, engine) < 300


def test_a_callback_that_fails_stops_the_request(generator: BlendChatGenerator, engine: BlendEngine) -> None:
    def fail(chunk: StreamingChunk) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        generator.run(MESSAGES, fail, generation_kwargs=LONG)
    assert looks_until_idle(engine) < 300


def looks_until_idle(engine: BlendEngine) -> int:
    looks = 0
    while engine._start().call(lambda vllm: vllm.get_num_unfinished_requests()):
        looks += 1
    return looks


def test_many_threads_share_one_generator(generator: BlendChatGenerator, documents: list[Document]) -> None:
    questions = [f"{document.content}\nWhich city?" for document in documents[:2]]

    def ask(question: str) -> str | None:
        return reply(generator.run(question, generation_kwargs={"max_tokens": 2}, documents=documents)).text

    alone = list(map(ask, questions))
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, questions * 4)) == alone * 4


def test_parts_of_text_become_lines(generator: BlendChatGenerator) -> None:
    message = ChatMessage.from_user(content_parts=[TextContent("Say"), TextContent("hello.")])
    assert "<|im_start|>user\nSay\nhello.<|im_end|>" in generator.to_prompt([message]).text


def test_what_the_model_cannot_read_is_refused(generator: BlendChatGenerator) -> None:
    image = ImageContent(base64_image="AAAA", mime_type="image/png", validation=False)
    with pytest.raises(PromptError, match="reads text only"):
        generator.run([ChatMessage.from_user(content_parts=["What is this?", image])])
    with pytest.raises(ConfigError, match="no argument 'best_of'"):
        generator.run(MESSAGES, generation_kwargs={"best_of": 2})


class City(BaseModel):
    """A place."""

    name: Literal["Arlon"]
    river: Literal["Rhine", "Semois"]


def test_structured_output(generator: BlendChatGenerator) -> None:
    kwargs = {"response_format": City, "max_tokens": 40}
    text = reply(generator.run("Arlon lies on the Semois. Describe it as JSON.", generation_kwargs=kwargs)).text
    assert text is not None
    assert City.model_validate_json(text).name == "Arlon"


# Documents in conversations.

many = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def messages_of(conversation: list[Message], marked: bool) -> list[ChatMessage]:
    kinds = {"system": ChatMessage.from_system, "assistant": ChatMessage.from_assistant}
    return [kinds.get(message.role, ChatMessage.from_user)(message.marked if marked else message.plain)
            for message in conversation]


def rendered(engine: BlendEngine, conversation: list[Message], template: str) -> str:
    roles = {"system": "system", "assistant": "assistant"}
    rows = [{"role": roles.get(message.role, "user"), "content": message.plain} for message in conversation]
    return str(engine.tokenizer.apply_chat_template(rows, chat_template=template, tokenize=False,
                                                    add_generation_prompt=True))


@many
@given(conversations, st.sampled_from(sorted(TEMPLATES)))
def test_marked_documents_in_any_conversation(engine: BlendEngine, conversation: list[Message], name: str) -> None:
    generator = BlendChatGenerator(engine=engine, chat_template=TEMPLATES[name])
    prompt = generator.to_prompt(messages_of(conversation, marked=True))
    assert prompt.text == rendered(engine, conversation, TEMPLATES[name])
    check_chunks(prompt.chunks, conversation, name)


@many
@given(conversations, st.sampled_from(sorted(TEMPLATES)))
def test_named_documents_in_any_conversation(engine: BlendEngine, conversation: list[Message], name: str) -> None:
    """The messages hold the documents as they are, marks in them included."""
    generator = BlendChatGenerator(engine=engine, chat_template=TEMPLATES[name])
    named = [replace(message, documents=[f"Passage {number}.{place} {text} of {number}.{place}"
                                         for place, text in enumerate(message.documents)])
             for number, message in enumerate(conversation)]
    documents = [Document(content=text) for message in named for text in message.documents]
    prompt = generator.to_prompt(messages_of(named, marked=False), documents=documents)
    assert prompt.text == rendered(engine, named, TEMPLATES[name])
    check_chunks(prompt.chunks, named, name)
