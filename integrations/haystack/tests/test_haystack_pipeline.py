"""RAG pipelines with stock components around the generator: same text, same answers, and reuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from blendrag import BlendEngine, BlendOutput
from haystack import Document, Pipeline
from haystack.components.builders import ChatPromptBuilder
from haystack.components.retrievers.in_memory import InMemoryBM25Retriever
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.document_stores.in_memory import InMemoryDocumentStore

from haystack_integrations.components.generators.blendrag import BlendChatGenerator
from haystack_integrations.components.writers.blendrag import BlendDocumentWriter

QUESTION = "On which river does Dresden lie?"
PLAIN = """{% for document in documents %}
[{{ loop.index }} of {{ documents | length }}] {{ document.meta.source }}: {{ document.content }}
{% endfor %}"""
TRIMMED = "{% for document in documents %}{{ document.content | trim }}{% if not loop.last %}, {% endif %}{% endfor %}"
JOINED = "{{ documents | map(attribute='content') | join('\n\n') }}"
SHOUTED = "{% for document in documents %}{{ document.content | upper }}{% endfor %}"


def template_of(context: str) -> list[ChatMessage]:
    return [ChatMessage.from_system("Answer from these passages.\n" + context), ChatMessage.from_user("{{ question }}")]


def pipeline_of(store: InMemoryDocumentStore, generator: BlendChatGenerator, template: Any,
                connected: bool = True) -> Pipeline:
    pipeline = Pipeline()
    pipeline.add_component("retriever", InMemoryBM25Retriever(store, top_k=4))
    pipeline.add_component("builder", ChatPromptBuilder(template))
    pipeline.add_component("llm", generator)
    pipeline.connect("retriever.documents", "builder.documents")
    pipeline.connect("builder.prompt", "llm.messages")
    if connected:
        pipeline.connect("retriever.documents", "llm.documents")
    return pipeline


def inputs(**of_the_llm: Any) -> dict[str, Any]:
    return {"retriever": {"query": QUESTION}, "builder": {"question": QUESTION}, "llm": of_the_llm}


def ask(pipeline: Pipeline, **generation_kwargs: Any) -> ChatMessage:
    [reply] = pipeline.run(inputs(generation_kwargs=generation_kwargs))["llm"]["replies"]
    return reply


@pytest.fixture
def store(engine: BlendEngine, documents: list[Document]) -> InMemoryDocumentStore:
    """Four documents, one with white space around its text, and their KV."""
    engine.store.clear()
    documents[1] = replace(documents[1], content=f" {documents[1].content}\n")
    store = InMemoryDocumentStore()
    BlendDocumentWriter(store, engine=engine).run(documents)
    return store


@pytest.mark.parametrize(("context", "connected"), [(PLAIN, True), (PLAIN, False), (TRIMMED, True), (JOINED, True)])
def test_the_model_reads_what_it_would_without_us(store: InMemoryDocumentStore, generator: BlendChatGenerator,
                                                  engine: BlendEngine, answered: list[BlendOutput], context: str,
                                                  connected: bool) -> None:
    """Byte for byte what a plain vLLM is sent; with `documents` connected each is a chunk, without it is found."""
    pipeline = pipeline_of(store, generator, template_of(context), connected)
    messages: list[ChatMessage] = pipeline.run(inputs(generation_kwargs={"max_tokens": 1}),
                                               include_outputs_from={"builder"})["builder"]["prompt"]
    rows = [{"role": message.role.value, "content": message.text} for message in messages]
    expected = engine.tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=True)
    [output] = answered
    assert engine.tokenizer.decode(output.prompt_token_ids) == expected
    assert output.stats.chunks_reused + output.stats.chunks_prefix_cached == 4
    if connected:
        assert output.stats.chunks_found == 4


def test_text_that_the_template_changed_is_computed(store: InMemoryDocumentStore,
                                                    generator: BlendChatGenerator) -> None:
    pipeline = pipeline_of(store, generator, template_of(SHOUTED))
    assert ask(pipeline, max_tokens=1).meta["blend"]["chunks_found"] == 0


def test_string_templates_work_too(store: InMemoryDocumentStore, generator: BlendChatGenerator) -> None:
    template = "{% message role='user' %}" + PLAIN + "{{ question }}{% endmessage %}"
    blend = ask(pipeline_of(store, generator, template), max_tokens=1).meta["blend"]
    assert blend["chunks_reused"] == blend["chunks_found"] == 4


def test_recomputing_everything_answers_like_plain_vllm(store: InMemoryDocumentStore, generator: BlendChatGenerator,
                                                        engine: BlendEngine, documents: list[Document]) -> None:
    engine.encode([document.content or "" for document in documents], cache_salt="full")
    pipeline = pipeline_of(store, generator, template_of(PLAIN))
    full = ask(pipeline, policy="full", cache_salt="full")
    plain = ask(pipeline, blend=False, cache_salt="plain")
    assert full.text == plain.text
    assert full.meta["blend"]["chunks_reused"] == 4
    assert plain.meta["blend"]["policy"] == "plain"


def test_reuse_is_counted(store: InMemoryDocumentStore, generator: BlendChatGenerator, engine: BlendEngine,
                          documents: list[Document]) -> None:
    engine.encode([document.content or "" for document in documents], cache_salt="counted")
    meta = ask(pipeline_of(store, generator, template_of(PLAIN)), cache_salt="counted", max_tokens=1).meta
    assert meta["usage"]["prompt_tokens_details"]["cached_tokens"] == meta["blend"]["reused_tokens"] > 0


async def test_async_and_streamed_runs_answer_alike(store: InMemoryDocumentStore,
                                                    generator: BlendChatGenerator) -> None:
    pipeline = pipeline_of(store, generator, template_of(PLAIN))
    expected = ask(pipeline, policy="full").text
    result = await pipeline.run_async(inputs(generation_kwargs={"policy": "full"}))
    assert result["llm"]["replies"][0].text == expected
    said = [chunk.content async for chunk in pipeline.stream(inputs(generation_kwargs={"policy": "full"}))
            if isinstance(chunk, StreamingChunk)]
    assert "".join(said) == expected
    assert len(said) > 3


def test_a_loaded_pipeline_answers_alike(store: InMemoryDocumentStore, generator: BlendChatGenerator) -> None:
    loaded = Pipeline.loads(pipeline_of(store, generator, template_of(PLAIN)).dumps())
    assert ask(loaded, max_tokens=1).meta["model"] == generator.model
    assert loaded.get_component("llm").engine is generator.engine  # type: ignore[attr-defined]
