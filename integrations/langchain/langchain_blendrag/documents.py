"""Documents to prompt text that still knows where each of them begins and ends."""

from __future__ import annotations

from collections.abc import Iterable

from blendrag import mark_chunks
from langchain_core.documents import Document
from langchain_core.prompts import BasePromptTemplate, format_document


def format_documents(documents: Iterable[Document], *, document_prompt: BasePromptTemplate[str] | None = None,
                     separator: str = "\n\n", delimiter: str | None = None) -> str:
    """Joins the documents, in their order, and marks each as a chunk.

    Made for `retriever | format_documents`.  Without the marks the text is `separator.join(texts)`; `BlendLLM` and
    `ChatBlend` remove them from the prompt, and `blendrag.strip_marks` does so for other models.

    Args:
        documents: in the order in which the prompt shall hold them.
        document_prompt: formats a document, metadata included; the whole is the chunk.  None: its text alone.
        separator: text between two documents; it belongs to neither chunk.
        delimiter: the engine's `BlendConfig.delimiter`; None for a pair of marks around each document.
    """
    return mark_chunks((document_text(document, document_prompt) for document in documents), delimiter, separator)


def document_text(document: Document, document_prompt: BasePromptTemplate[str] | None = None) -> str:
    """The text of a document's chunk: the document as the prompt formats it, or its text alone."""
    return document.page_content if document_prompt is None else format_document(document, document_prompt)
