"""Documents and the KV of their texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blendrag import BlendEngine, BlendPrompt, EncodedChunk
from blendrag.adapters import forget_chunks, store_chunks
from blendrag.errors import ConfigError
from langchain_core.documents import Document
from langchain_core.prompts import BasePromptTemplate

from langchain_blendrag._settings import EngineSettings
from langchain_blendrag.documents import document_text

Progress = Callable[[int, int], None]
"""Called with (documents done, documents in all)."""


class DocumentKV:
    """Computes and forgets the KV of documents for the model that will read them.

    What goes wrong here costs time, never an answer: a prompt computes what is not stored.  So a document that is too
    long for the model, or a store that cannot be written, is a warning in the log.

    Args:
        llm: the `BlendLLM` or `ChatBlend` that will read the documents.
        engine: the engine that will read them, in place of `llm`.
        prefix: what the documents are encoded behind, as `BlendEngine.encode` takes it.
        document_prompt: formats a document in the prompts to come; None: only its text stands there.

    Raises:
        ConfigError: neither llm nor engine is given, or both are.
    """

    def __init__(self, llm: EngineSettings | None, engine: BlendEngine | None, prefix: str | BlendPrompt = "",
                 document_prompt: BasePromptTemplate[str] | None = None) -> None:
        if (llm is None) == (engine is None):
            raise ConfigError("which model will read the documents? pass it as llm=, or its engine as engine=")
        self._llm = llm
        self._engine = engine
        self.prefix = prefix
        self.document_prompt = document_prompt

    @property
    def engine(self) -> BlendEngine:
        """The engine that will read the documents."""
        if self._llm is not None:
            return self._llm.engine
        assert self._engine is not None
        return self._engine

    def text(self, document: Document) -> str:
        """The document as it will stand in prompts: the text of its chunk."""
        return document_text(document, self.document_prompt)

    def attach(self, documents: Sequence[Document], on_progress: Progress | None = None) -> list[Document]:
        """Copies of the documents whose `metadata["blend"]` says what is stored of them, after storing the rest.

        It is `{"key": str, "tokens": int, "stored": bool}`: the entry's key in the chunk store, the chunk's length, and
        whether the store holds it (very short chunks are not worth storing).
        """
        entries = self.encode(list(map(self.text, documents)), on_progress)
        found = [{"key": entry.key, "tokens": entry.tokens, "stored": bool(entry.key)} for entry in entries]
        return [document.model_copy(update={"metadata": {**document.metadata, "blend": entry}})
                for document, entry in zip(documents, found, strict=True)]

    def encode(self, texts: Sequence[str], on_progress: Progress | None = None) -> list[EncodedChunk]:
        """Stores the KV of those texts that are not stored yet."""
        return store_chunks(self.engine, texts, self.prefix, on_progress)

    def forget(self, texts: Sequence[str]) -> None:
        """Deletes the stored KV of these texts."""
        forget_chunks(self.engine, texts, self.prefix)
