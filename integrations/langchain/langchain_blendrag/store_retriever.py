"""The retriever of a vector store that keeps KV ready."""

from __future__ import annotations

from typing import Any, Protocol, cast

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.runnables import run_in_executor
from langchain_core.vectorstores import VectorStoreRetriever

from langchain_blendrag._kv import DocumentKV


class HasKV(Protocol):
    """A `BlendVectorStore`."""

    kv: DocumentKV


class BlendVectorStoreRetriever(VectorStoreRetriever):
    """What `BlendVectorStore.as_retriever` returns: its documents carry their KV entries, as `BlendRetriever`'s do."""

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun,
                                **kwargs: Any) -> list[Document]:
        return self._kv.attach(super()._get_relevant_documents(query, run_manager=run_manager, **kwargs))

    async def _aget_relevant_documents(self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun,
                                       **kwargs: Any) -> list[Document]:
        found = await super()._aget_relevant_documents(query, run_manager=run_manager, **kwargs)
        return await run_in_executor(None, self._kv.attach, found)

    @property
    def _kv(self) -> DocumentKV:
        return cast("HasKV", self.vectorstore).kv
