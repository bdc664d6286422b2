"""Embeddings from a local sentence-transformers model."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from langchain_core.embeddings import Embeddings


class SentenceTransformerEmbeddings(Embeddings):
    """Unit-length embeddings from a sentence-transformers model, which is loaded on first use.

    Args:
        model: name or folder of the model.
        arguments: further arguments of `sentence_transformers.SentenceTransformer`, such as `device`.
    """

    def __init__(self, model: str, **arguments: Any) -> None:
        self.model = model
        self.arguments = arguments

    @cached_property
    def _encoder(self) -> Any:
        from sentence_transformers import SentenceTransformer

        return SentenceTransformer(self.model, **self.arguments)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One vector a text."""
        vectors: list[list[float]] = self._encoder.encode(
            texts, normalize_embeddings=True, show_progress_bar=False).tolist()
        return vectors

    def embed_query(self, text: str) -> list[float]:
        """The vector of a question."""
        return self.embed_documents([text])[0]
