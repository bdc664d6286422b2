"""The vector index behind `BlendRetriever.from_documents`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import faiss
import numpy as np
from blendrag.errors import DocumentError
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever


class FaissRetriever(BaseRetriever):
    """The documents nearest to a question by cosine similarity, nearest first."""

    documents: list[Document]
    embeddings: Embeddings
    index: Any
    k: int = 4

    @classmethod
    def from_documents(cls, documents: Sequence[Document], embeddings: Embeddings, k: int) -> Self:
        """Embeds the documents.  Raises DocumentError where there are none."""
        if not documents:
            raise DocumentError("there are no documents to index: check the folder, or what the text splitter returned")
        vectors = _unit(embeddings.embed_documents([document.page_content for document in documents]))
        index = faiss.IndexFlatIP(vectors.shape[1])
        index.add(vectors)
        return cls(documents=list(documents), embeddings=embeddings, index=index, k=k)

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun,
                                k: int | None = None) -> list[Document]:
        _, nearest = self.index.search(_unit([self.embeddings.embed_query(query)]), k or self.k)
        return [self.documents[number] for number in nearest[0] if number >= 0]


def _unit(vectors: Sequence[Sequence[float]]) -> Any:
    rows = np.asarray(vectors, dtype=np.float32)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
