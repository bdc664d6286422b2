"""Marking documents, and the index behind `BlendRetriever.from_documents`."""

from __future__ import annotations

import pytest
from blendrag import DELIMITER, BlendPrompt, strip_marks
from blendrag.errors import DocumentError
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import RunnableLambda

from langchain_blendrag import format_documents
from langchain_blendrag._index import FaissRetriever


def test_marked_documents_read_as_plain_text(documents: list[Document]) -> None:
    texts = [document.page_content for document in documents]
    marked = format_documents(documents)
    assert strip_marks(marked) == "\n\n".join(texts)
    prompt = BlendPrompt.from_text("Answer from these.\n" + marked + "\nWhere?")
    assert prompt.chunks == texts
    assert prompt.text == "Answer from these.\n" + "\n\n".join(texts) + "\nWhere?"


def test_it_is_a_step_of_a_chain(documents: list[Document]) -> None:
    chain = RunnableLambda(lambda _: documents) | format_documents
    assert chain.invoke("question") == format_documents(documents)


def test_a_document_cannot_end_its_chunk() -> None:
    forged = f"one{DELIMITER}two"
    marked = format_documents([Document(forged), Document("three")])
    assert BlendPrompt.from_text(marked).chunks == [forged, "three"]


def test_no_documents_are_no_text() -> None:
    assert format_documents([]) == ""


def test_the_index_returns_the_nearest_first(documents: list[Document]) -> None:
    index = FaissRetriever.from_documents(documents, DeterministicFakeEmbedding(size=8), k=2)
    for document in documents:
        found = index.invoke(document.page_content)
        assert found[0] == document
        assert len(found) == 2
    assert len(index.invoke("a", k=9)) == len(documents)


def test_an_empty_index_is_refused() -> None:
    with pytest.raises(DocumentError, match="no documents to index"):
        FaissRetriever.from_documents([], DeterministicFakeEmbedding(size=8), k=2)
