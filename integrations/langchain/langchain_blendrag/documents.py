"""Documents to prompt text that still knows where each of them begins and ends."""

from __future__ import annotations

from collections.abc import Iterable

from blendrag import DELIMITER, mark_chunks
from langchain_core.documents import Document


def format_documents(documents: Iterable[Document], *, separator: str = "\n\n", delimiter: str = DELIMITER) -> str:
    """Joins the texts of the documents, in their order, and marks each as a chunk.

    Made for `retriever | format_documents`.  Without the marks the text is `separator.join(texts)`; `BlendLLM` and
    `ChatBlend` remove them from the prompt, and `blendrag.strip_marks` does so for other models.

    Args:
        documents: in the order in which the prompt shall hold them.
        separator: text between two documents; it belongs to neither chunk.
        delimiter: the mark; the engine's `BlendConfig.delimiter`.
    """
    return mark_chunks((document.page_content for document in documents), delimiter, separator)
