"""Documents to chunk texts."""

from __future__ import annotations

from collections.abc import Iterable

from haystack import Document


def chunk_texts(documents: Iterable[Document]) -> list[str]:
    """The text of each document as one chunk, each once, in their order; documents without text are left out.

    White space at both ends belongs to no chunk: templates trim it, or put some of their own there.
    """
    return list(dict.fromkeys(text for document in documents if (text := (document.content or "").strip())))
