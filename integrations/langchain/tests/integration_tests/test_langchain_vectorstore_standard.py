"""LangChain's own tests of vector stores."""

from collections.abc import Iterator

import pytest
from blendrag import BlendEngine
from langchain_core.vectorstores import VectorStore
from langchain_tests.integration_tests import VectorStoreIntegrationTests

from langchain_blendrag import BlendVectorStore


class TestBlendVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, engine: BlendEngine) -> Iterator[VectorStore]:  # type: ignore[override]  # it yields there too
        store = BlendVectorStore(self.get_embeddings(), engine=engine)
        yield store
        store.delete()
