"""`BlendVectorStore`: a vector store in FAISS that keeps the KV cache of its documents in step."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import numpy as np
from blendrag import BlendEngine, BlendPrompt
from blendrag.errors import DocumentError
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import run_in_executor
from langchain_core.vectorstores import VectorStore
from langchain_core.vectorstores.utils import maximal_marginal_relevance

from langchain_blendrag._filters import Filter, condition
from langchain_blendrag._flat_index import FlatIndex, Scored, Vectors
from langchain_blendrag._kv import DocumentKV, Progress
from langchain_blendrag._settings import EngineSettings
from langchain_blendrag.store_retriever import BlendVectorStoreRetriever


class BlendVectorStore(VectorStore):
    """Documents in FAISS, with the KV of their texts in the chunk store of the model that will read them.

    Adding a document computes its KV.  Deleting it, or adding another one under its id, deletes its KV unless another
    document of this store reads the same.  Scores are cosine similarities, 1 for the same direction; search is exact.

    Example:
        >>> from langchain_blendrag import BlendVectorStore, ChatBlend, format_documents
        >>> model = ChatBlend(model="Qwen/Qwen3-8B", config={"store_path": "~/kv"})
        >>> store = BlendVectorStore.from_documents(documents, embeddings, llm=model)
        >>> context = store.as_retriever(search_kwargs={"k": 8}) | format_documents
        >>> chain = {"context": context, "question": RunnablePassthrough()} | prompt | model

    Methods may be called from several threads.  Of each method there is an async twin, which awaits the embeddings.

    Args:
        embedding: makes vectors of texts.
        llm: the `BlendLLM` or `ChatBlend` that will read the documents.
        engine: the engine that will read them, in place of `llm`.
        prefix: the text before the first chunk of every prompt, or such a prompt; see `BlendEngine.encode`.  Empty: the
            neutral variant, which every prompt can reuse.
        document_prompt: formats a document in prompts, as `format_documents` and `create_blend_documents_chain` take
            it; metadata that it puts there is part of the chunk.  None: only the text stands there.

    Raises:
        ConfigError: neither llm nor engine is given, or both are.
    """

    def __init__(self, embedding: Embeddings, *, llm: EngineSettings | None = None, engine: BlendEngine | None = None,
                 prefix: str | BlendPrompt = "", document_prompt: BasePromptTemplate[str] | None = None) -> None:
        self.embedding = embedding
        self.kv = DocumentKV(llm, engine, prefix, document_prompt)
        self._index = FlatIndex()
        self._texts: Counter[str] = Counter()
        self._writing = threading.Lock()

    def __len__(self) -> int:
        """How many documents there are."""
        return len(self._index)

    def __bool__(self) -> bool:
        return True  # an empty store is a store

    @property
    def embeddings(self) -> Embeddings:
        """Makes vectors of texts."""
        return self.embedding

    # Writing.

    def add_documents(self, documents: list[Document], ids: Sequence[str | None] | None = None, *,
                      on_progress: Progress | None = None, **kwargs: Any) -> list[str]:
        """Embeds documents and computes their KV; a document whose id is here already replaces the other.

        Args:
            ids: of each document; its own `id`, or a new one, where None.
            on_progress: called with (done, total) after each document's KV.

        Returns:
            The documents' ids.

        Raises:
            DocumentError: there is not one id for each document.
        """
        named = _named(documents, ids)
        vectors = self.embedding.embed_documents([document.page_content for document in named]) if named else []
        return self._put(named, vectors, on_progress)

    async def aadd_documents(self, documents: list[Document], ids: Sequence[str | None] | None = None, *,
                             on_progress: Progress | None = None, **kwargs: Any) -> list[str]:
        """`add_documents` for asyncio; `on_progress` is called in another thread."""
        named = _named(documents, ids)
        vectors = await self.embedding.aembed_documents([one.page_content for one in named]) if named else []
        return await run_in_executor(None, self._put, named, vectors, on_progress)

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Deletes documents, all of them where ids is None, and the KV that no other document here needs.

        Ids that are not here are passed over.
        """
        with self._writing:
            self._forget(self._index.remove(self._index.ids() if ids is None else ids))
        return True

    def _put(self, documents: list[Document], vectors: Vectors, on_progress: Progress | None) -> list[str]:
        if documents:
            with self._writing:
                texts = list(map(self.kv.text, documents))
                latest = {str(document.id): number for number, document in enumerate(documents)}.values()
                replaced = self._index.put([documents[number] for number in latest],
                                           [vectors[number] for number in latest])
                self._texts.update(texts[number] for number in latest)
                self._forget(replaced)
                self.kv.encode(texts, on_progress)
        return [str(document.id) for document in documents]

    def _forget(self, removed: Sequence[Document]) -> None:
        texts = [self.kv.text(document) for document in removed]
        self._texts.subtract(texts)
        orphans = [text for text in dict.fromkeys(texts) if self._texts[text] <= 0]
        for text in orphans:
            del self._texts[text]
        if orphans:
            self.kv.forget(orphans)

    # Reading.

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """The documents with these ids, in this order; ids that are not here are left out."""
        return self._index.get(ids)

    def similarity_search(self, query: str, k: int = 4, filter: Filter | None = None,  # noqa: A002
                          **kwargs: Any) -> list[Document]:
        """The k documents nearest to the query, nearest first.

        Args:
            filter: which documents to search among: a function of their metadata, or a mapping such as
                `{"source": "a.md", "year": {"$gte": 2020}}`, with `$eq`, `$ne`, `$gt`, `$gte`, `$lt`, `$lte`, `$in`,
                `$nin`, `$and`, `$or` and `$not`.
        """
        return _documents(self.similarity_search_with_score(query, k, filter))

    async def asimilarity_search(self, query: str, k: int = 4, filter: Filter | None = None,  # noqa: A002
                                 **kwargs: Any) -> list[Document]:
        """`similarity_search` for asyncio."""
        return _documents(await self.asimilarity_search_with_score(query, k, filter))

    def similarity_search_with_score(self, query: str, k: int = 4, filter: Filter | None = None,  # noqa: A002
                                     **kwargs: Any) -> Scored:
        """`similarity_search` with the cosine similarity of each document."""
        return self.similarity_search_with_score_by_vector(self.embedding.embed_query(query), k, filter)

    async def asimilarity_search_with_score(self, query: str, k: int = 4, filter: Filter | None = None,  # noqa: A002
                                            **kwargs: Any) -> Scored:
        """`similarity_search_with_score` for asyncio."""
        vector = await self.embedding.aembed_query(query)
        return await run_in_executor(None, self.similarity_search_with_score_by_vector, vector, k, filter)

    def similarity_search_by_vector(self, embedding: list[float], k: int = 4, filter: Filter | None = None,  # noqa: A002
                                    **kwargs: Any) -> list[Document]:
        """The k documents nearest to a vector, nearest first."""
        return _documents(self.similarity_search_with_score_by_vector(embedding, k, filter))

    def similarity_search_with_score_by_vector(self, embedding: list[float], k: int = 4,
                                               filter: Filter | None = None) -> Scored:  # noqa: A002
        """`similarity_search_by_vector` with the cosine similarity of each document."""
        return self._index.search(embedding, k, condition(filter))

    def max_marginal_relevance_search(self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5,
                                      filter: Filter | None = None, **kwargs: Any) -> list[Document]:  # noqa: A002
        """k of the documents nearest to the query, chosen to differ from each other.

        Args:
            fetch_k: how many of the nearest documents to choose from.
            lambda_mult: 1 for nothing but nearness, 0 for nothing but difference.
        """
        vector = self.embedding.embed_query(query)
        return self.max_marginal_relevance_search_by_vector(vector, k, fetch_k, lambda_mult, filter)

    async def amax_marginal_relevance_search(self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5,
                                             filter: Filter | None = None,  # noqa: A002
                                             **kwargs: Any) -> list[Document]:
        """`max_marginal_relevance_search` for asyncio."""
        vector = await self.embedding.aembed_query(query)
        return await run_in_executor(None, self.max_marginal_relevance_search_by_vector, vector, k, fetch_k,
                                     lambda_mult, filter)

    def max_marginal_relevance_search_by_vector(self, embedding: list[float], k: int = 4, fetch_k: int = 20,
                                                lambda_mult: float = 0.5, filter: Filter | None = None,  # noqa: A002
                                                **kwargs: Any) -> list[Document]:
        """`max_marginal_relevance_search` for a vector."""
        near, vectors = self._index.search_vectors(embedding, max(fetch_k, k), condition(filter))
        chosen = maximal_marginal_relevance(np.asarray(embedding, np.float32), vectors, lambda_mult, k) if near else []
        return [near[number] for number in chosen]

    def as_retriever(self, **kwargs: Any) -> BlendVectorStoreRetriever:
        """A retriever whose documents have their KV ready, as `BlendRetriever`'s have.

        Args:
            kwargs: of `VectorStoreRetriever`, such as `search_type="mmr"` and `search_kwargs={"k": 8}`.
        """
        tags = kwargs.pop("tags", None) or self._get_retriever_tags()
        return BlendVectorStoreRetriever(vectorstore=self, tags=tags, **kwargs)

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        """The cosine similarity, where opposite directions are as irrelevant as unrelated ones."""
        return lambda similarity: min(max(similarity, 0.0), 1.0)

    # Making and keeping.

    @classmethod
    def from_texts(cls, texts: list[str], embedding: Embeddings, metadatas: list[dict[str, Any]] | None = None, *,
                   ids: list[str] | None = None, on_progress: Progress | None = None, **kwargs: Any) -> Self:
        """A store of texts.

        Args:
            on_progress: called with (done, total) after each text's KV.
            kwargs: of the constructor: `llm` or `engine`, `prefix`, `document_prompt`.
        """
        store = cls(embedding, **kwargs)
        store.add_texts(texts, metadatas, ids=ids, on_progress=on_progress)
        return store

    @classmethod
    async def afrom_texts(cls, texts: list[str], embedding: Embeddings, metadatas: list[dict[str, Any]] | None = None,
                          *, ids: list[str] | None = None, on_progress: Progress | None = None,
                          **kwargs: Any) -> Self:
        """`from_texts` for asyncio."""
        store = cls(embedding, **kwargs)
        await store.aadd_texts(texts, metadatas, ids=ids, on_progress=on_progress)
        return store

    def save_local(self, folder_path: str | Path, index_name: str = "index") -> None:
        """Writes documents and vectors to `<index_name>.npz` in a folder; KV is kept by `BlendConfig.store_path`.

        Raises:
            DocumentError: a document's metadata is not JSON.
        """
        folder = Path(folder_path)
        folder.mkdir(parents=True, exist_ok=True)
        self._index.save(folder / f"{index_name}.npz")

    @classmethod
    def load_local(cls, folder_path: str | Path, embeddings: Embeddings, index_name: str = "index",
                   **kwargs: Any) -> Self:
        """What `save_local` wrote.  Loading runs no code from the file, whoever wrote it.

        The engine does not start; KV that is not stored any more is computed for what `as_retriever` returns, or for
        all documents by `encode`.

        Args:
            kwargs: of the constructor: `llm` or `engine`, `prefix`, `document_prompt`.

        Raises:
            DocumentError: there is no such store, or it is damaged.
        """
        store = cls(embeddings, **kwargs)
        store._index = FlatIndex.load(Path(folder_path, f"{index_name}.npz"))
        store._texts.update(map(store.kv.text, store._index.get(store._index.ids())))
        return store

    def encode(self, on_progress: Progress | None = None) -> None:
        """Computes the KV of all documents that is not stored, after `load_local` for instance."""
        self.kv.encode(list(self._texts), on_progress)


def _named(documents: Sequence[Document], ids: Sequence[str | None] | None) -> list[Document]:
    """Copies of the documents that have ids."""
    given = [document.id for document in documents] if ids is None else list(ids)
    if len(given) != len(documents):
        raise DocumentError(f"{len(documents)} documents came with {len(given)} ids: give one for each, or none")
    return [document.model_copy(update={"id": one or document.id or str(uuid4())})
            for document, one in zip(documents, given, strict=True)]


def _documents(scored: Scored) -> list[Document]:
    return [document for document, _ in scored]
