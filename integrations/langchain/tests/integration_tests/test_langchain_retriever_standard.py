"""LangChain's own tests of retrievers."""

from typing import Any

import pytest
from blendrag import BlendEngine
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_tests.integration_tests import RetrieversIntegrationTests

from langchain_blendrag import BlendRetriever


class TestBlendRetriever(RetrieversIntegrationTests):
    @pytest.fixture(autouse=True)
    def _wrapped(self, engine: BlendEngine, documents: list[Document]) -> None:
        store = InMemoryVectorStore.from_documents(documents, DeterministicFakeEmbedding(size=8))
        self.params = {"retriever": store.as_retriever(), "engine": engine}

    @property
    def retriever_constructor(self) -> type[BlendRetriever]:
        return BlendRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return self.params

    @property
    def retriever_query_example(self) -> str:
        return "On which river does Dresden lie?"
