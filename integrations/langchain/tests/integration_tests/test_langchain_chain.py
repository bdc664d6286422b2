"""The main job: retriever | format_documents, prompt, model, with the KV of the documents reused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from blendrag import BlendEngine
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough

from langchain_blendrag import BlendLLM, BlendRetriever, ChatBlend, format_documents

PROMPT = ChatPromptTemplate([("system", "Answer from these passages.\n\n{context}"), ("human", "{question}")])
EMBEDDINGS = DeterministicFakeEmbedding(size=8)


def chain(retriever: BlendRetriever, model: BlendLLM | ChatBlend) -> Any:
    return {"context": retriever | format_documents, "question": RunnablePassthrough()} | PROMPT | model


def fresh(documents: list[Document], tag: str) -> list[Document]:
    """The documents with text that no other test has stored."""
    return [Document(f"{tag}: {document.page_content}", metadata=document.metadata) for document in documents]


def test_an_indexed_corpus_is_reused_from_the_first_question(engine: BlendEngine, documents: list[Document]) -> None:
    seen: list[tuple[int, int]] = []
    retriever = BlendRetriever.from_documents(fresh(documents, "Guide"), engine=engine, embeddings=EMBEDDINGS, k=3,
                                              on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    answer = chain(retriever, ChatBlend(engine=engine, temperature=0, max_tokens=8)).invoke("Which river?")
    blend = answer.response_metadata["blend"]
    assert (blend["chunks_found"], blend["chunks_reused"]) == (3, 3)


def test_a_wrapped_retriever_keeps_its_order_and_gains_entries(engine: BlendEngine, documents: list[Document]) -> None:
    texts = fresh(documents, "Atlas")
    retriever = BlendRetriever(retriever=RunnableLambda(lambda _: texts[::-1]), llm=BlendLLM(engine=engine))
    found = retriever.invoke("Which river?")
    assert [document.page_content for document in found] == [document.page_content for document in texts[::-1]]
    assert all("blend" not in document.metadata for document in texts)
    for document in found:
        entry = document.metadata["blend"]
        assert entry["stored"]
        assert entry["key"] in engine.store
        assert entry["tokens"] == len(engine.tokens.chunk_ids(document.page_content))
        assert document.metadata["source"].endswith(".md")
    assert engine.stored([document.page_content for document in texts]) == [True] * 4


def test_a_known_prefix_makes_the_first_chunk_exact(engine: BlendEngine, documents: list[Document]) -> None:
    chat, texts = ChatBlend(engine=engine, temperature=0, max_tokens=8), fresh(documents, "Handbook")
    example = PROMPT.invoke({"context": format_documents(texts[:1]), "question": ""})
    retriever = BlendRetriever.from_documents(texts, llm=chat, embeddings=EMBEDDINGS,
                                              prefix=chat.to_prompt(example).prefix)
    blend = chain(retriever, chat).invoke("Which river?").response_metadata["blend"]
    assert [chunk["exact"] for chunk in blend["chunks"]] == [True, False, False, False]
    assert blend["chunks_reused"] == 4


def test_documents_that_cannot_be_stored_are_still_answered_from(engine: BlendEngine, documents: list[Document],
                                                                 caplog: pytest.LogCaptureFixture) -> None:
    endless = Document("word " * 3000)
    mixed = [*fresh(documents, "Notes"), Document("Short."), endless]
    with caplog.at_level(logging.WARNING):
        retriever = BlendRetriever.from_documents(mixed, engine=engine, embeddings=EMBEDDINGS, k=6)
    assert "split it" in caplog.text
    found = {document.page_content: document.metadata["blend"] for document in retriever.invoke("Which river?")}
    assert [found[document.page_content]["stored"] for document in mixed] == [True] * 4 + [False] * 2
    assert found["Short."] == {"key": "", "tokens": 2, "stored": False}
    few = BlendRetriever(retriever=RunnableLambda(lambda _: mixed[3:5]), engine=engine)
    answer = chain(few, ChatBlend(engine=engine, temperature=0, max_tokens=8)).invoke("Which river?")
    assert [chunk["reason"] for chunk in answer.response_metadata["blend"]["chunks"]] == ["", "too short"]


async def test_the_chain_runs_async(engine: BlendEngine, documents: list[Document]) -> None:
    retriever = BlendRetriever.from_documents(fresh(documents, "Report"), engine=engine, embeddings=EMBEDDINGS, k=2)
    llm = BlendLLM(engine=engine, temperature=0, max_tokens=8)
    asked = chain(retriever, llm)
    expected = asked.invoke("Which river?")
    assert await asked.ainvoke("Which river?") == expected
    assert "".join([piece async for piece in asked.astream("Which river?")]) == expected
