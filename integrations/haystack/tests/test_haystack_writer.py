"""`BlendDocumentWriter`: what the document store holds, the chunk store holds too."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from blendrag import BlendEngine
from haystack import Document, Pipeline
from haystack.document_stores.errors import DuplicateDocumentError
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.document_stores.types import DuplicatePolicy

from haystack_integrations.components.generators.blendrag import BlendChatGenerator
from haystack_integrations.components.writers.blendrag import BlendDocumentWriter


@pytest.fixture
def writer(engine: BlendEngine) -> BlendDocumentWriter:
    """Writes to an empty document store; no KV is stored."""
    engine.store.clear()
    return BlendDocumentWriter(InMemoryDocumentStore(), engine=engine)


def stored(engine: BlendEngine, documents: list[Document]) -> list[bool]:
    return engine.stored([document.content or "" for document in documents])


async def test_documents_are_written_and_their_kv_is_stored(writer: BlendDocumentWriter, engine: BlendEngine,
                                                            documents: list[Document]) -> None:
    pipeline = Pipeline()
    pipeline.add_component("writer", writer)
    assert pipeline.run({"writer": {"documents": documents[:2]}})["writer"] == {
        "documents_written": 2, "chunks_encoded": 2}
    assert stored(engine, documents) == [True, True, False, False]
    same = replace(documents[0], id="same text")
    result = await pipeline.run_async({"writer": {"documents": [*documents[2:], same]}})
    assert result["writer"] == {"documents_written": 3, "chunks_encoded": 2}
    assert stored(engine, documents) == [True] * 4
    assert writer.document_store.count_documents() == 5
    assert await writer.run_async([]) == {"documents_written": 0, "chunks_encoded": 0}


async def test_deleted_documents_take_their_kv_with_them(writer: BlendDocumentWriter, engine: BlendEngine,
                                                         documents: list[Document]) -> None:
    same = replace(documents[1], id="same text", meta={})
    writer.run([*documents, same])
    assert writer.delete_documents([documents[0].id, documents[1].id, "unknown"]) == 1
    assert stored(engine, documents) == [False, True, True, True]
    assert await writer.delete_documents_async([same.id, documents[2].id]) == 2
    assert stored(engine, documents) == [False, False, False, True]
    assert [document.id for document in writer.document_store.filter_documents()] == [documents[3].id]


def test_a_document_that_is_overwritten(writer: BlendDocumentWriter, engine: BlendEngine,
                                        documents: list[Document]) -> None:
    old, new, kept, _ = documents
    writer.run([old, kept])
    result = writer.run([replace(new, id=old.id), kept], policy=DuplicatePolicy.OVERWRITE)
    assert result == {"documents_written": 2, "chunks_encoded": 1}
    assert stored(engine, [old, new, kept]) == [False, True, True]


def test_a_document_that_is_skipped(writer: BlendDocumentWriter, engine: BlendEngine,
                                    documents: list[Document]) -> None:
    old, new, other, _ = documents
    writer.run([old])
    result = writer.run([replace(new, id=old.id), other], policy=DuplicatePolicy.SKIP)
    assert result == {"documents_written": 1, "chunks_encoded": 1}
    assert stored(engine, [old, new, other]) == [True, False, True]


def test_a_duplicate_that_fails_changes_no_kv(writer: BlendDocumentWriter, engine: BlendEngine,
                                              documents: list[Document]) -> None:
    old, new, *_ = documents
    writer.run([old])
    with pytest.raises(DuplicateDocumentError):
        writer.run([replace(new, id=old.id)])  # the store's own default
    assert stored(engine, [old, new]) == [True, False]


def test_trouble_with_kv_fails_nothing(writer: BlendDocumentWriter, engine: BlendEngine, documents: list[Document],
                                       caplog: pytest.LogCaptureFixture) -> None:
    hopeless = [Document(content="much too long " * 2000), Document(content=None, meta={"image": "a.png"}),
                Document(content=" \n")]
    with caplog.at_level(logging.WARNING):
        result = writer.run([hopeless[0], documents[0], *hopeless[1:]])
    assert result == {"documents_written": 4, "chunks_encoded": 1}
    assert "raise max_model_len" in caplog.text
    assert writer.delete_documents([document.id for document in (*hopeless, documents[0])]) == 1
    assert writer.document_store.count_documents() == 0


class Forgetful(InMemoryDocumentStore):
    """A store that cannot be searched by content."""

    def filter_documents(self, filters: dict[str, Any] | None = None) -> list[Document]:
        if filters and filters["field"] == "content":
            raise NotImplementedError("no filter on content")
        return super().filter_documents(filters)


def test_kv_stays_where_it_cannot_be_told_who_needs_it(engine: BlendEngine, documents: list[Document],
                                                       caplog: pytest.LogCaptureFixture) -> None:
    writer = BlendDocumentWriter(Forgetful(), engine=engine)
    writer.run(documents[:1])
    assert writer.delete_documents([documents[0].id]) == 0
    assert stored(engine, documents[:1]) == [True]
    assert "cannot be searched by content" in caplog.text


def test_behind_a_prefix_the_first_document_is_exact(generator: BlendChatGenerator, engine: BlendEngine,
                                                     documents: list[Document]) -> None:
    engine.store.clear()
    question = f"Read.\n{documents[0].content}\n{documents[1].content}\nWhere is Basel?"
    prefix = generator.to_prompt(question, documents=documents).prefix
    assert prefix.endswith("user\nRead.\n")
    writer = BlendDocumentWriter(InMemoryDocumentStore(), engine=engine, prefix=prefix)
    assert writer.run(documents[:2])["chunks_encoded"] == 2
    engine.encode([documents[1].content or ""])  # as an answer may do, with `populate`
    [reply] = generator.run(question, documents=documents)["replies"]
    assert [chunk["exact"] for chunk in reply.meta["blend"]["chunks"] if chunk["reused"]] == [True, False]
    assert writer.delete_documents([document.id for document in documents]) == 3
