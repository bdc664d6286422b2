"""Documents by id, and their vectors in FAISS."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Self

import faiss
import numpy as np
from blendrag.errors import DocumentError
from langchain_core.documents import Document

from langchain_blendrag._filters import Condition

Vectors = Sequence[Sequence[float]]
Scored = list[tuple[Document, float]]


class FlatIndex:
    """Exact search by cosine similarity among documents that have ids.  Safe to use from several threads.

    Vectors are scaled to length 1 and kept in a `faiss.IndexIDMap2` over a `faiss.IndexFlatIP`, by numbers that are
    never used twice.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._faiss: Any = None
        self._numbers: dict[str, int] = {}
        self._documents: dict[int, Document] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._documents)

    def ids(self) -> list[str]:
        """The ids of all documents, oldest first."""
        with self._lock:
            return list(self._numbers)

    def get(self, ids: Iterable[str]) -> list[Document]:
        """Copies of the documents with these ids, in this order; ids that are not there are left out."""
        with self._lock:
            return [_copy(self._documents[self._numbers[one]]) for one in ids if one in self._numbers]

    def put(self, documents: Sequence[Document], vectors: Vectors) -> list[Document]:
        """Adds documents, each with an id of its own, in place of those that have the same ids; returns the latter.

        Raises:
            DocumentError: the vectors are not as long as those that are here.
        """
        rows = _unit(vectors)
        with self._lock:
            if self._faiss is None:
                self._faiss = faiss.IndexIDMap2(faiss.IndexFlatIP(rows.shape[1]))
            if rows.shape[1] != self._faiss.d:
                raise DocumentError(f"the embeddings have {rows.shape[1]} dimensions, those in the store "
                                    f"{self._faiss.d}: use the model that the store was made with")
            replaced = self.remove([str(document.id) for document in documents])
            numbers = range(self._next, self._next + len(documents))
            self._faiss.add_with_ids(rows, np.asarray(numbers, dtype=np.int64))
            self._next = numbers.stop
            for number, document in zip(numbers, documents, strict=True):
                self._documents[number] = _copy(document)
                self._numbers[str(document.id)] = number
            return replaced

    def remove(self, ids: Iterable[str]) -> list[Document]:
        """Removes the documents with these ids, and returns them; ids that are not there are left out."""
        with self._lock:
            numbers = [self._numbers.pop(one) for one in dict.fromkeys(ids) if one in self._numbers]
            if numbers:
                self._faiss.remove_ids(np.asarray(numbers, dtype=np.int64))
            return [self._documents.pop(number) for number in numbers]

    def search(self, vector: Sequence[float], k: int, wanted: Condition | None = None) -> Scored:
        """The k documents nearest to the vector among those that are wanted, with their cosine similarity."""
        with self._lock:
            if not self._documents or k < 1:
                return []
            chosen = {}
            if wanted is not None:
                numbers = [number for number, document in self._documents.items() if wanted(document.metadata)]
                selector = faiss.IDSelectorBatch(np.asarray(numbers, dtype=np.int64))
                chosen = {"params": faiss.SearchParameters(sel=selector)}  # type: ignore[call-arg]
            scores, found = self._faiss.search(_unit([vector]), min(k, len(self._documents)), **chosen)
            return [(_copy(self._documents[number]), float(score))
                    for number, score in zip(found[0], scores[0], strict=True) if number >= 0]

    def search_vectors(self, vector: Sequence[float], k: int,
                       wanted: Condition | None = None) -> tuple[list[Document], Any]:
        """As `search`, with the documents' unit vectors [documents, dimensions]."""
        with self._lock:
            found = [document for document, _ in self.search(vector, k, wanted)]
            return found, self._vectors(found)

    def _vectors(self, documents: Sequence[Document]) -> Any:
        if not documents:
            return np.zeros((0, 0), dtype=np.float32)
        numbers = [self._numbers[str(document.id)] for document in documents]
        return self._faiss.reconstruct_batch(np.asarray(numbers, dtype=np.int64))

    def save(self, path: Path) -> None:
        """Writes everything to one file, which is complete or absent.

        Raises:
            DocumentError: metadata that JSON cannot hold.
        """
        with self._lock:
            documents = list(self._documents.values())
            vectors = self._vectors(documents)
        try:
            text = json.dumps([[one.id, one.page_content, one.metadata] for one in documents])
        except (TypeError, ValueError) as error:
            raise DocumentError(f"the metadata of a document cannot be saved ({error}): keep to what JSON knows, text "
                                "and numbers for instance") from error
        with NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
            np.savez(file, vectors=vectors, documents=np.frombuffer(text.encode(), dtype=np.uint8))
        Path(file.name).replace(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """What `save` wrote; reading it runs no code from the file.

        Raises:
            DocumentError: there is no such file, or it is damaged.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                vectors, text = file["vectors"], file["documents"].tobytes().decode()
            documents = [Document(id=one, page_content=content, metadata=metadata)
                         for one, content, metadata in json.loads(text)]
            index = cls()
            if documents:
                index.put(documents, vectors)
        except FileNotFoundError as error:
            raise DocumentError(f"there is no vector store in {path}: name the folder that save_local wrote") from error
        except Exception as error:
            raise DocumentError(f"{path} is not a vector store, or damaged ({error}): save it again") from error
        return index


def _unit(vectors: Vectors) -> Any:
    rows = np.atleast_2d(np.asarray(vectors, dtype=np.float32))
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def _copy(document: Document) -> Document:
    return document.model_copy(update={"metadata": dict(document.metadata)})
