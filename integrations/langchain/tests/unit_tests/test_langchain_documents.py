"""Marking documents."""

from __future__ import annotations

from blendrag import BlendPrompt, mark_chunks, strip_marks
from langchain_core.documents import Document
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnableLambda

from langchain_blendrag import format_documents


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
    forged = f"one{mark_chunks(['two'])}three"
    marked = format_documents([Document(forged), Document("three")])
    assert BlendPrompt.from_text(marked).chunks == [forged, "three"]


def test_no_documents_are_no_text() -> None:
    assert format_documents([]) == ""


def test_metadata_that_the_prompt_shows_is_part_of_the_chunk(documents: list[Document]) -> None:
    shown = PromptTemplate.from_template("[{source}]\n{page_content}")
    chunks = BlendPrompt.from_text(format_documents(documents, document_prompt=shown)).chunks
    assert chunks == [f"[{document.metadata['source']}]\n{document.page_content}" for document in documents]
