"""`BlendIngestion`: KV is computed by a pipeline, and goes with its documents."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from blendrag import BlendEngine
from blendrag.errors import ConfigError, StoreError
from llama_index.core import Document, MockEmbedding, SummaryIndex, VectorStoreIndex
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.llms import MockLLM
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import MetadataMode, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index_reference import Exchange

from llama_index.ingestion.blendrag import BlendIngestion, base
from llama_index.ingestion.blendrag.ledger import Ledger
from llama_index.llms.blendrag import BlendLLM

SPLITTER = SentenceSplitter(chunk_size=60, chunk_overlap=0, paragraph_separator="\n\n")


@pytest.fixture(autouse=True)
def nothing_stored(engine: BlendEngine) -> Iterator[None]:
    """Each test starts with an empty store and ledger, and leaves none of its KV behind."""
    engine.store.clear()
    base._in_memory.pop(engine, None)
    yield
    engine.store.clear()


@pytest.fixture
def documents(passages: list[str]) -> list[Document]:
    return [Document(text=text, id_=f"document {number}", metadata={"page": number}) for number, text in
            enumerate(passages)]


def text_of(document: Document) -> str:
    """The text of a document's only chunk, as the model reads it."""
    return document.get_content(MetadataMode.LLM)


def pipeline(ingestion: BlendIngestion, docstore: SimpleDocumentStore | None = None,
             strategy: DocstoreStrategy = DocstoreStrategy.UPSERTS) -> IngestionPipeline:
    return IngestionPipeline(transformations=[SPLITTER, MockEmbedding(8), ingestion], docstore=docstore,
                             vector_store=SimpleVectorStore(stores_text=False), docstore_strategy=strategy)


def stored(engine: BlendEngine, *documents: Document) -> list[bool]:
    return engine.stored([text_of(document) for document in documents])


def test_what_a_pipeline_ingests_is_reused_by_a_stock_query_engine(
        llm: BlendLLM, documents: list[Document], exchanges: list[Exchange]) -> None:
    nodes = list(pipeline(BlendIngestion(llm)).run(documents=documents))
    assert stored(llm.engine, *documents) == [True] * 3
    index = VectorStoreIndex(nodes, embed_model=MockEmbedding(8))
    index.as_query_engine(llm=llm, similarity_top_k=3).query("On which river does Dresden lie?")
    assert [exchange.stats.chunks_reused for exchange in exchanges] == [3]


def test_nodes_pass_unchanged_and_what_is_stored_is_not_computed(llm: BlendLLM, nodes: list[TextNode]) -> None:
    ingestion = BlendIngestion(llm)
    before = [node.to_dict() for node in nodes]
    assert ingestion(nodes) is nodes
    assert [node.to_dict() for node in nodes] == before
    encoded = llm.engine.stats.encoded_chunks
    ingestion([*nodes, TextNode(text=" ")], show_progress=True)
    assert llm.engine.stats.encoded_chunks == encoded


async def test_async_pipelines_leave_the_loop_free(llm: BlendLLM, documents: list[Document]) -> None:
    await pipeline(BlendIngestion(llm)).arun(documents=documents[:1])
    assert stored(llm.engine, *documents) == [True, False, False]


def test_a_changed_document_takes_its_old_kv_along(llm: BlendLLM, documents: list[Document]) -> None:
    run = pipeline(BlendIngestion(llm), SimpleDocumentStore())
    run.run(documents=documents)
    changed = Document(text=documents[0].text + " It is old.", id_="document 0", metadata={"page": 0})
    run.run(documents=[changed, *documents[1:]])
    assert stored(llm.engine, changed, *documents) == [True, False, True, True]


def test_chunks_of_one_version_add_up_over_several_calls(llm: BlendLLM, documents: list[Document]) -> None:
    document = Document(text="\n\n".join(found.text for found in documents))
    splitter = SentenceSplitter(chunk_size=40, chunk_overlap=0, paragraph_separator="\n\n")
    nodes = splitter.get_nodes_from_documents([document])
    assert len(nodes) == 3
    ingestion = BlendIngestion(llm)
    for node in nodes:
        ingestion([node])
    assert ingestion.delete(document.doc_id) == 3


def test_documents_that_the_docstore_lost_lose_their_kv(llm: BlendLLM, documents: list[Document]) -> None:
    docstore = SimpleDocumentStore()
    run = pipeline(BlendIngestion(llm, docstore=docstore), docstore, DocstoreStrategy.UPSERTS_AND_DELETE)
    run.run(documents=documents)
    for left in (2, 1, 1):  # with nothing new to ingest, the pipeline's cache knows its input
        run.run(documents=documents[:left])
        assert stored(llm.engine, *documents) == [number < left for number in range(3)]
    run.run(documents=documents)
    assert stored(llm.engine, *documents) == [True] * 3


def test_duplicates_are_ingested_once_and_nothing_is_deleted(llm: BlendLLM, documents: list[Document]) -> None:
    docstore = SimpleDocumentStore()
    run = pipeline(BlendIngestion(llm, docstore=docstore), docstore, DocstoreStrategy.DUPLICATES_ONLY)
    twin = Document(text=documents[0].text, id_="twin", metadata={"page": 0})
    run.run(documents=[*documents[:2], twin])
    run.run(documents=[documents[2]])
    assert stored(llm.engine, *documents) == [True] * 3


def test_a_chunk_of_two_documents_survives_one_of_them(llm: BlendLLM, documents: list[Document]) -> None:
    ingestion = BlendIngestion(llm)
    twin = Document(text=documents[0].text, id_="twin", metadata={"page": 0})
    pipeline(ingestion).run(documents=[documents[0], twin, documents[1]])
    assert (ingestion.delete("document 0"), stored(llm.engine, twin)) == (0, [True])
    assert (ingestion.delete("twin"), stored(llm.engine, twin)) == (1, [False])
    assert ingestion.delete("twin", "nobody") == 0
    assert stored(llm.engine, documents[1]) == [True]


def test_it_follows_an_indexs_docstore_too(llm: BlendLLM, documents: list[Document]) -> None:
    index = SummaryIndex.from_documents(documents, transformations=[SPLITTER])
    ingestion = BlendIngestion(llm, docstore=index.docstore)
    ingestion(list(index.docstore.docs.values()))
    assert stored(llm.engine, *documents) == [True] * 3
    index.delete_ref_doc("document 1", delete_from_docstore=True)
    ingestion([])
    assert stored(llm.engine, *documents) == [True, False, True]


def test_the_pipelines_cache_skips_what_is_known_until_kv_is_deleted(llm: BlendLLM,
                                                                     documents: list[Document]) -> None:
    ingestion = BlendIngestion(llm)
    run = pipeline(ingestion)
    run.run(documents=documents[:1])
    llm.engine.forget([text_of(documents[0])])
    run.run(documents=documents[:1])
    assert stored(llm.engine, documents[0]) == [False]  # nobody told the ledger
    ingestion(run.run(documents=documents[:1]))
    assert ingestion.delete("document 0") == 1
    run.run(documents=documents[:1])
    assert stored(llm.engine, documents[0]) == [True]


def test_settings_survive_serialising(llm: BlendLLM, documents: list[Document]) -> None:
    saved = BlendIngestion(llm, collection="handbook").to_dict()
    back = BlendIngestion.from_dict(saved)
    assert back.to_dict() == saved
    pipeline(back).run(documents=documents[:1])
    assert stored(llm.engine, documents[0]) == [True]  # in the same engine, as it was lent


def test_worker_processes_are_refused_before_they_start_anything(llm: BlendLLM, documents: list[Document]) -> None:
    ingestion = BlendIngestion(llm)
    with pytest.raises(ConfigError, match="leave it out of the pipeline and call it on the result"):
        pipeline(ingestion).run(documents=documents, num_workers=2)
    assert stored(llm.engine, *documents) == [False] * 3
    run = IngestionPipeline(transformations=[MockEmbedding(8)])
    nodes = ingestion(run.run(documents=documents, num_workers=2))
    assert [node.get_content(MetadataMode.LLM) for node in nodes] == list(map(text_of, documents))
    assert stored(llm.engine, *documents) == [True] * 3


def test_what_cannot_be_stored_is_told_and_stops_nothing(llm: BlendLLM, documents: list[Document],
                                                         monkeypatch: pytest.MonkeyPatch,
                                                         caplog: pytest.LogCaptureFixture) -> None:
    def full(*_: Any) -> Any:
        raise StoreError("the disk is full: make room")

    ingestion = BlendIngestion(llm)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Ledger, "add", full)
        ingestion([TextNode(text="word " * 3000), TextNode(text=documents[0].text)])
    assert "will not be deleted with them: the disk is full" in caplog.text
    assert "the model takes 2048" in caplog.text
    assert llm.engine.stored([documents[0].text]) == [True]


def test_bad_arguments_are_named(llm: BlendLLM) -> None:
    with pytest.raises(ConfigError, match="MockLLM has no KV to store"):
        BlendIngestion(MockLLM())
    with pytest.raises(ConfigError, match="needs the model that will answer"):
        BlendIngestion()
