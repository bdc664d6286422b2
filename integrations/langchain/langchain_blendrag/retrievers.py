"""Retrievers whose documents have their KV cache ready."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from blendrag import BlendEngine, BlendPrompt
from blendrag.errors import DocumentError
from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.prompts import BasePromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, run_in_executor
from langchain_core.vectorstores import VectorStoreRetriever
from pydantic import ConfigDict, InstanceOf, PrivateAttr, model_validator

from langchain_blendrag._kv import DocumentKV, Progress
from langchain_blendrag._settings import EngineSettings
from langchain_blendrag.embeddings import SentenceTransformerEmbeddings
from langchain_blendrag.vectorstores import BlendVectorStore


class BlendRetriever(BaseRetriever):
    """Attaches to each retrieved document the KV entry of its text, computing what is not stored yet.

    Wraps any LangChain retriever, or builds a `BlendVectorStore` of its own with `from_documents`.  Documents come in
    the wrapped retriever's order, as copies whose `metadata["blend"]` is `{"key": str, "tokens": int, "stored": bool}`:
    the entry's key in the chunk store, the chunk's length, and whether the store holds it (very short chunks are not
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

    prefix: str | InstanceOf[BlendPrompt] = ""
    """The text before the first chunk of every prompt, as `llm.to_prompt(...).prefix` gives it, or such a prompt.

    Chunks are then encoded behind it, which makes the first one of a prompt exact; prompts that begin otherwise do not
    find them.  Empty: the neutral variant, which every prompt can reuse.
    """

    document_prompt: BasePromptTemplate[str] | None = None
    """Formats a document in prompts, as `format_documents` takes it; None: only its text stands there."""

    k: int | None = None
    """How many documents to return, at most; None: as many as the wrapped retriever does."""

    _kv: DocumentKV = PrivateAttr()

    @model_validator(mode="after")
    def _has_engine(self) -> Self:
        self._kv = DocumentKV(self.llm, self.engine, self.prefix, self.document_prompt)
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
        prefix: str | BlendPrompt = "",
        document_prompt: BasePromptTemplate[str] | None = None,
        on_progress: Progress | None = None,
        **fields: Any,
    ) -> Self:
        """Embeds the documents into a `BlendVectorStore`, and computes the KV of those that are not stored.

        Args:
            documents: chunks, as a text splitter returns them.
            embeddings: LangChain embeddings, or name or folder of a sentence-transformers model.
            on_progress: called with (done, total) after each document's KV.

        Raises:
            DocumentError: there are no documents.
        """
        if not documents:
            raise DocumentError("there are no documents to index: check the folder, or what the text splitter returned")
        if isinstance(embeddings, str):
            embeddings = SentenceTransformerEmbeddings(embeddings)
        reader: dict[str, Any] = {"llm": llm, "engine": engine, "prefix": prefix, "document_prompt": document_prompt}
        store = BlendVectorStore(embeddings, **reader)
        store.add_documents(list(documents), on_progress=on_progress)
        return cls(retriever=VectorStoreRetriever(vectorstore=store), k=k, **reader, **fields)

    def encode(self, documents: Sequence[Document], on_progress: Progress | None = None) -> list[Document]:
        """Copies of the documents with their KV entries attached, after computing what is not stored.

        A document that is too long for the model, and all of them where the store cannot be written, come back
        unencoded, with a warning in the log: a prompt computes what is not stored.
        """
        return self._kv.attach(documents, on_progress)

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun,
                                k: int | None = None) -> list[Document]:
        k = self.k if k is None else k
        documents = self.retriever.invoke(query, {"callbacks": run_manager.get_child()}, **self._wanted(k))
        return self.encode(documents[:k])

    async def _aget_relevant_documents(self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun,
                                       k: int | None = None) -> list[Document]:
        k = self.k if k is None else k
        documents = await self.retriever.ainvoke(query, {"callbacks": run_manager.get_child()}, **self._wanted(k))
        return await run_in_executor(None, self.encode, documents[:k])

    def _wanted(self, k: int | None) -> dict[str, Any]:
        """A retriever that knows no k ignores it; other runnables may refuse it."""
        return {"k": k} if k is not None and isinstance(self.retriever, BaseRetriever) else {}
