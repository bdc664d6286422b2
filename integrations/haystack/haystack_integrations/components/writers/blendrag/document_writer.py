"""`BlendDocumentWriter`: documents into a store, and their KV cache with them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from os import PathLike
from typing import Any

from haystack import Document, component, default_from_dict, default_to_dict, logging
from haystack.document_stores.types import DocumentStore, DuplicatePolicy

from blendrag import BlendConfig, BlendEngine, BlendPrompt
from blendrag.adapters import forget_chunks, store_chunks
from haystack_integrations.common.blendrag import EngineHandle, chunk_texts

logger = logging.getLogger(__name__)

_NOTHING = BlendPrompt(add_special_tokens=False)


@component
class BlendDocumentWriter:
    """Writes documents to a DocumentStore and keeps their KV cache in step with it.

    It takes the place of `DocumentWriter` in an indexing pipeline.  The KV of each document's text is computed once and
    stored; a `BlendChatGenerator` with the same `model`, `config` and `engine_args` reuses it in every prompt that
    holds the text.  Overwritten and deleted documents take their KV with them, unless another one has the same text.

    Usage example:

        >>> writer = BlendDocumentWriter(InMemoryDocumentStore(), "Qwen/Qwen3-8B", config={"store_path": "~/kv"})
        >>> writer.run(documents=[Document(content="Paris lies on the Seine. ...")])
        {'documents_written': 1, 'chunks_encoded': 1}

    Trouble with KV never fails an indexing run: what is not stored is computed in the prompt, and the log says so.
    """

    def __init__(self, document_store: DocumentStore, model: str | PathLike[str] | None = None, *,
                 policy: DuplicatePolicy = DuplicatePolicy.NONE, prefix: str = "",
                 config: BlendConfig | Mapping[str, Any] | None = None, engine_args: Mapping[str, Any] | None = None,
                 engine: BlendEngine | None = None) -> None:
        """Starts nothing: the model loads with `warm_up`.

        :param document_store: where the documents are written.
        :param model: name or folder of the model that will read the documents.
        :param policy: what to do with a document whose ID the store has already, as for `DocumentWriter`.
        :param prefix: the text before the first document of every prompt, as `BlendChatGenerator.to_prompt(...).prefix`
            gives it.  Documents are then encoded behind it, which makes the first one of a prompt exact; prompts that
            begin otherwise do not find them.  Empty: the neutral variant, which every prompt can reuse.
        :param config: settings of blending and of the chunk store, fields of `blendrag.BlendConfig`.
        :param engine_args: further engine arguments of vLLM's.
        :param engine: a `BlendEngine` to use; it brings its model, config and engine arguments.
        """
        self.document_store = document_store
        self.policy = policy
        self.prefix = prefix
        self._handle = EngineHandle(type(self).__name__, model, config, engine_args, engine)

    @property
    def engine(self) -> BlendEngine:
        """The engine that will read the documents, started or not; components with equal arguments share it."""
        return self._handle.engine

    def warm_up(self) -> None:
        """Loads the model, unless it is loaded."""
        self._handle.start()

    async def warm_up_async(self) -> None:
        """Like `warm_up`, without blocking the event loop."""
        await asyncio.to_thread(self.warm_up)

    def close(self) -> None:
        """Closes the store, lets go of the engine, and frees its memory where no other component holds it."""
        self._handle.close()
        if hasattr(self.document_store, "close"):
            self.document_store.close()

    async def close_async(self) -> None:
        """Like `close`, without blocking the event loop."""
        await asyncio.to_thread(self._handle.close)
        if hasattr(self.document_store, "close_async"):
            await self.document_store.close_async()

    def to_dict(self) -> dict[str, Any]:
        """The component as plain values."""
        return default_to_dict(self, document_store=self.document_store, policy=self.policy.name, prefix=self.prefix,
                               **self._handle.init_parameters())

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> BlendDocumentWriter:
        """The inverse of `to_dict`."""
        values = dict(data.get("init_parameters", {}))
        if "policy" in values:
            values["policy"] = DuplicatePolicy[values["policy"]]
        return default_from_dict(cls, data | {"init_parameters": values})

    @component.output_types(documents_written=int, chunks_encoded=int)
    def run(self, documents: list[Document], policy: DuplicatePolicy | None = None) -> dict[str, int]:
        """Writes the documents, then computes the KV that is not stored yet.

        :param documents: chunks, as a splitter returns them; those without text are written only.
        :param policy: overrides that of the component.
        :returns: `documents_written`, as the store counts them, and `chunks_encoded`, the number of texts whose KV was
            computed now.
        """
        policy = self.policy if policy is None else policy
        ids = [document.id for document in documents]
        keeps = policy in (DuplicatePolicy.SKIP, DuplicatePolicy.FAIL)
        replaced = [] if keeps else self._held_by_these_alone(ids)
        written = self.document_store.write_documents(documents, policy=policy)
        held = documents
        if written < len(documents):  # the store kept its own: their text counts
            held = self._find("id", ids) or documents
        texts = chunk_texts(held)
        staying = set(texts)
        self._forget([text for text in replaced if text not in staying])
        encoded = store_chunks(self.engine, texts, self._behind)
        return {"documents_written": written, "chunks_encoded": sum(chunk.new for chunk in encoded)}

    @component.output_types(documents_written=int, chunks_encoded=int)
    async def run_async(self, documents: list[Document], policy: DuplicatePolicy | None = None) -> dict[str, int]:
        """Like `run`, on a thread of its own: the event loop stays free."""
        return await asyncio.to_thread(self.run, documents, policy)

    def delete_documents(self, document_ids: list[str]) -> int:
        """Deletes documents from the store, and their KV.

        A text that another document has too keeps its KV.  So do all texts where the store cannot be searched by
        `content`, so that this cannot be told; the chunk store's budget makes room there in time.

        :param document_ids: of the documents; those that the store does not have count as nothing.
        :returns: how many KV entries were deleted.
        """
        texts = self._held_by_these_alone(document_ids)
        self.document_store.delete_documents(document_ids)
        return self._forget(texts)

    async def delete_documents_async(self, document_ids: list[str]) -> int:
        """Like `delete_documents`, on a thread of its own."""
        return await asyncio.to_thread(self.delete_documents, document_ids)

    def _held_by_these_alone(self, ids: list[str]) -> list[str]:
        """Chunk texts that no document but these has."""
        these = [document for document in self._find("id", ids) if document.content]
        holders = self._find("content", sorted({document.content for document in these if document.content}))
        gone, found = set(ids), {document.id for document in holders}
        others = set(chunk_texts(document for document in holders if document.id not in gone))
        # A store that does not find a document by its content does not find the others that have it either.
        texts = chunk_texts(document for document in these if document.id in found)
        return [text for text in texts if text not in others]

    def _find(self, field: str, values: list[str]) -> list[Document]:
        if not values:
            return []
        try:
            return self.document_store.filter_documents({"field": field, "operator": "in", "value": values})
        except Exception as error:  # each store has its own
            logger.warning("The document store cannot be searched by {field} ({error}): the KV of documents that go "
                           "stays until its budget is used up.", field=field, error=error)
            return []

    def _forget(self, texts: list[str]) -> int:
        if not texts:
            return 0
        # `populate` stores the variant behind nothing too.
        return sum(forget_chunks(self.engine, texts, prefix) for prefix in {self._behind, _NOTHING})

    @property
    def _behind(self) -> BlendPrompt:
        """What the documents are encoded behind: a chat template has put the special tokens there already."""
        return BlendPrompt(self.prefix, add_special_tokens=False)
