"""Finds the chunks that a question is about: MiniLM embeddings in a FAISS index that is kept on disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from blendrag.documents import DocumentChunk
from blendrag.errors import StoreError
from blendrag.models import fetch


class Retriever:
    """An index over chunks.

    Args:
        chunks: what to search; the index on disk is named by their content.
        folder: where indexes are kept.

    Raises:
        StoreError: the index cannot be written.
    """

    def __init__(self, chunks: Sequence[DocumentChunk], folder: Path) -> None:
        import faiss
        from sentence_transformers import SentenceTransformer

        self.chunks = list(chunks)
        self._model: Any = SentenceTransformer(str(fetch("minilm")), device="cpu", local_files_only=True)
        path = folder / f"{_digest(self.chunks)}.faiss"
        self.stored = path.is_file()
        if self.stored:
            self._index: Any = faiss.read_index(str(path))
            return
        vectors = self._embed([chunk.text for chunk in self.chunks])
        self._index = faiss.IndexFlatIP(vectors.shape[1])
        self._index.add(vectors)
        part = path.with_suffix(f".{os.getpid()}.part")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            faiss.write_index(self._index, str(part))
            part.replace(path)
        except (OSError, RuntimeError) as error:  # faiss reports files as RuntimeError
            raise StoreError(f"the index cannot be written to {folder} ({error}): free some space, or name another "
                             "folder with --store") from error

    def search(self, question: str) -> list[DocumentChunk]:
        """All chunks, best first."""
        _, found = self._index.search(self._embed([question]), len(self.chunks))
        return [self.chunks[number] for number in found[0]]

    def _embed(self, texts: list[str]) -> Any:
        """[texts, 384] float32, of length one: their inner product is the cosine."""
        return self._model.encode(texts, normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=False)


def _digest(chunks: Sequence[DocumentChunk]) -> str:
    digest = blake3(b"minilm")
    for chunk in chunks:
        digest.update(blake3(chunk.text.encode()).digest())
    return digest.hexdigest(16)
