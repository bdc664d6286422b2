"""`BlendRetriever`: a retriever whose documents have their KV cache ready."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Self

from blendrag import BlendEngine, EncodedChunk
from blendrag.errors import ConfigError, PromptError, StoreError
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable
from pydantic import ConfigDict, model_validator

from langchain_blendrag._index import FaissRetriever
from langchain_blendrag._settings import EngineSettings
from langchain_blendrag.embeddings import SentenceTransformerEmbeddings

logger = logging.getLogger(__name__)


class BlendRetriever(BaseRetriever):
    """Attaches to each retrieved document the KV entry of its text, computing what is not stored yet.

    Wraps any LangChain retriever, or builds an index of its own with `from_documents`.  Documents come in the wrapped
    retriever's order, as copies whose `metadata["blend"]` is `{"key": str, "tokens": int, "stored": bool}`: the
    entry's key in the chunk store, the chunk's length, and whether the store holds it (very short chunks are not
    worth storing).

    Example:
        >>> retriever = BlendRetriever(retriever=vector_store.as_retriever(), llm=llm)
        >>> chain = {"context": retriever | format_documents, "question": RunnablePassthrough()} | prompt | llm
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    retriever: Runnable[str, list[Document]]
    """Finds the documents."""

    llm: EngineSettings | None = None
    """The `BlendLLM` or `ChatBlend` that will read the documents."""

    engine: BlendEngine | None = None
    """The engine that will read them, in place of `llm`."""

    prefix: str = ""
    """The text before the first chunk of every prompt, as `llm.to_prompt(...).prefix` gives it.

    Chunks are then encoded behind it, which makes the first one of a prompt exact; prompts that begin otherwise do not
    find them.  Empty: the neutral variant, which every prompt can reuse.
    """

    k: int | None = None
    """How many documents to return, at most; None: as many as the wrapped retriever does."""

    @model_validator(mode="after")
    def _has_engine(self) -> Self:
        if (self.llm is None) == (self.engine is None):
            raise ConfigError("BlendRetriever needs the model that will read the documents: pass llm= or engine=")
        return self

    @classmethod
    def from_documents(
        cls,
        documents: Sequence[Document],
        *,
        llm: EngineSettings | None = None,
        engine: BlendEngine | None = None,
        embeddings: Embeddings | str = "sentence-transformers/all-MiniLM-L6-v2",
        k: int = 4,
        prefix: str = "",
        on_progress: Callable[[int, int], None] | None = None,
        **fields: Any,
    ) -> Self:
        """Embeds the documents into a FAISS index in memory, and computes the KV of those that are not stored.

        Args:
            documents: chunks, as a text splitter returns them.
            embeddings: LangChain embeddings, or name or folder of a sentence-transformers model.
            on_progress: called with (done, total) after each document's KV.

        Raises:
            DocumentError: there are no documents.
        """
        if isinstance(embeddings, str):
            embeddings = SentenceTransformerEmbeddings(embeddings)
        index = FaissRetriever.from_documents(documents, embeddings, k)
        made = cls(retriever=index, llm=llm, engine=engine, k=k, prefix=prefix, **fields)
        made.encode(documents, on_progress)
        return made

    def encode(self, documents: Sequence[Document],
               on_progress: Callable[[int, int], None] | None = None) -> list[Document]:
        """Copies of the documents with their KV entries attached, after computing what is not stored.

        A document that is too long for the model, and all of them where the store cannot be written, come back
        unencoded, with a warning in the log: a prompt computes what is not stored.
        """
        texts = [document.page_content for document in documents]
        try:
            entries = self._encode(texts, on_progress or (lambda _done, _total: None))
        except StoreError as error:
            logger.warning("the KV of %d documents was not stored: %s", len(documents), error)
            entries = [EncodedChunk("", 0, False) for _ in documents]
        found = [{"key": entry.key, "tokens": entry.tokens, "stored": bool(entry.key)} for entry in entries]
        return [document.model_copy(update={"metadata": {**document.metadata, "blend": entry}})
                for document, entry in zip(documents, found, strict=True)]

    def _encode(self, texts: list[str], report: Callable[[int, int], None]) -> list[EncodedChunk]:
        engine = self.engine if self.llm is None else self.llm.engine
        assert engine is not None
        try:
            return engine.encode(texts, self.prefix, report)
        except PromptError as error:
            if len(texts) == 1:
                logger.warning("the KV of a document was not computed: %s", error)
                return [EncodedChunk("", len(engine.tokens.chunk_ids(texts[0])), False)]
            # Nothing is computed before the lengths are checked, so halving costs little.
            half, total = len(texts) // 2, len(texts)
            return (self._encode(texts[:half], lambda done, _: report(done, total))
                    + self._encode(texts[half:], lambda done, _: report(half + done, total)))

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun,
                                k: int | None = None) -> list[Document]:
        k = self.k if k is None else k
        # A retriever that knows no k ignores it; other runnables may refuse it.
        wanted = {"k": k} if k is not None and isinstance(self.retriever, BaseRetriever) else {}
        documents = self.retriever.invoke(query, {"callbacks": run_manager.get_child()}, **wanted)
        return self.encode(documents[:k])
