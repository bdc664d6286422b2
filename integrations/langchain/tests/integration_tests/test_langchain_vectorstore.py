"""`BlendVectorStore`: documents in FAISS, and their KV in step."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blendrag import BlendEngine
from blendrag.errors import ConfigError, DocumentError
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.indexing import InMemoryRecordManager, aindex, index
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnableLambda

from langchain_blendrag import BlendVectorStore, ChatBlend, format_documents

EMBEDDINGS = DeterministicFakeEmbedding(size=8)


def texts(documents: list[Document]) -> list[str]:
    return [document.page_content for document in documents]


@pytest.fixture
def named(documents: list[Document]) -> list[Document]:
    """Four documents that have ids, and text that no other test has stored."""
    return [Document(f"Gazetteer: {document.page_content}", id=f"id{number}", metadata={"number": number})
            for number, document in enumerate(documents)]


@pytest.fixture
def store(engine: BlendEngine, named: list[Document]) -> BlendVectorStore:
    engine.forget(texts(named))
    return BlendVectorStore.from_documents(named, EMBEDDINGS, engine=engine)


def test_kv_is_stored_with_a_document_and_forgotten_with_it(engine: BlendEngine, store: BlendVectorStore,
                                                            named: list[Document]) -> None:
    assert engine.stored(texts(named)) == [True] * 4
    assert store.delete(["id1", "nothing"])
    assert engine.stored(texts(named)) == [True, False, True, True]
    assert store.get_by_ids(["id2", "id1", "id0"]) == [named[2], named[0]]
    assert store.delete()
    assert len(store) == 0
    assert engine.stored(texts(named)) == [False] * 4


def test_a_replaced_text_takes_its_kv_along(engine: BlendEngine, store: BlendVectorStore,
                                            named: list[Document]) -> None:
    news = Document(f"Revised edition. {named[0].page_content}", id="id0")
    assert store.add_documents([news]) == ["id0"]
    assert len(store) == 4
    assert engine.stored([named[0].page_content, news.page_content]) == [False, True]
    assert store.get_by_ids(["id0"]) == [news]
    assert named[0] not in store.similarity_search(named[0].page_content)


def test_kv_stays_while_another_document_has_the_text(engine: BlendEngine, store: BlendVectorStore,
                                                      named: list[Document]) -> None:
    text = named[0].page_content
    [twin] = store.add_texts([text])
    store.delete(["id0"])
    assert engine.stored([text]) == [True]
    store.add_documents([Document(text, id=twin, metadata={"page": 2})])
    assert engine.stored([text]) == [True]
    store.delete([twin])
    assert engine.stored([text]) == [False]


def test_the_last_of_equal_ids_counts(store: BlendVectorStore, named: list[Document]) -> None:
    first, last = named[1].model_copy(update={"id": "x"}), named[2].model_copy(update={"id": "x"})
    assert store.add_documents([first, last]) == ["x", "x"]
    assert store.get_by_ids(["x"]) == [last]
    with pytest.raises(DocumentError, match="4 documents came with 1 ids"):
        store.add_documents(named, ids=["a"])


def test_searches_find_the_nearest(store: BlendVectorStore, named: list[Document]) -> None:
    for document in named:
        [(found, score), *rest] = store.similarity_search_with_score(document.page_content, k=3)
        assert found == document
        assert score == pytest.approx(1)
        assert len(rest) == 2
        assert all(-1.0001 <= other < score for _, other in rest)
        vector = EMBEDDINGS.embed_query(document.page_content)
        assert store.similarity_search_by_vector(vector, k=1) == [document]
        assert store.search(document.page_content, "mmr", k=2)[0] == document
        [(found, relevance)] = store.similarity_search_with_relevance_scores(document.page_content, 9,
                                                                             score_threshold=0.99)
        assert (found, relevance) == (document, pytest.approx(1))
    assert len(store.similarity_search("anything", k=9)) == 4
    assert store.similarity_search("anything", k=0) == []


def test_marginal_relevance_prefers_what_differs(engine: BlendEngine) -> None:
    class Angles(DeterministicFakeEmbedding):
        def embed_query(self, text: str) -> list[float]:
            angle = np.deg2rad(float(text))
            return [float(np.cos(angle)), float(np.sin(angle))]

        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            return list(map(self.embed_query, texts))

    angles = BlendVectorStore.from_texts(["1", "2", "40"], Angles(size=2), engine=engine)
    assert texts(angles.max_marginal_relevance_search("0", k=2, lambda_mult=0.2)) == ["1", "40"]
    assert texts(angles.max_marginal_relevance_search("0", k=2, lambda_mult=1)) == ["1", "2"]
    assert texts(angles.max_marginal_relevance_search("0", k=2, fetch_k=2, lambda_mult=0.2)) == ["1", "2"]
    assert texts(angles.max_marginal_relevance_search("0", k=2, filter=lambda _: False)) == []


def test_filters_are_applied_before_the_search(store: BlendVectorStore, named: list[Document]) -> None:
    query = named[0].page_content
    assert store.similarity_search(query, k=1, filter={"number": 3}) == [named[3]]
    assert len(store.similarity_search(query, k=4, filter=lambda metadata: metadata["number"] > 1)) == 2
    assert store.similarity_search(query, filter={"number": 99}) == []
    retriever = store.as_retriever(search_kwargs={"k": 1, "filter": {"number": {"$in": [2]}}})
    assert retriever.invoke(query)[0].id == "id2"
    with pytest.raises(ConfigError, match="not an operator"):
        store.similarity_search(query, filter={"number": {"$near": 1}})


def test_documents_are_the_stores_own(store: BlendVectorStore) -> None:
    [found] = store.get_by_ids(["id0"])
    found.metadata["number"] = 77
    assert store.get_by_ids(["id0"])[0].metadata == {"number": 0}


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_retriever_brings_kv_that_was_lost_meanwhile(engine: BlendEngine, store: BlendVectorStore,
                                                             named: list[Document], asynchronous: bool) -> None:
    engine.forget(texts(named))
    retriever, query = store.as_retriever(search_kwargs={"k": 2}), named[1].page_content
    found = await retriever.ainvoke(query) if asynchronous else retriever.invoke(query)
    assert [document.metadata["blend"]["stored"] for document in found] == [True, True]
    assert engine.stored(texts(found)) == [True, True]
    assert sum(engine.stored(texts(named))) == 2
    store.encode()
    assert engine.stored(texts(named)) == [True] * 4


async def test_async_twins_do_the_same(engine: BlendEngine, named: list[Document]) -> None:
    sync = BlendVectorStore.from_documents(named, EMBEDDINGS, engine=engine)
    twin = await BlendVectorStore.afrom_documents(named, EMBEDDINGS, engine=engine)
    for query in ("river", named[2].page_content):
        assert await twin.asimilarity_search(query, 2) == sync.similarity_search(query, 2)
        assert await twin.asimilarity_search_with_score(query, 2) == sync.similarity_search_with_score(query, 2)
        assert await twin.amax_marginal_relevance_search(query, 2) == sync.max_marginal_relevance_search(query, 2)
        assert await twin.asimilarity_search(query, filter={"number": 1}) == [named[1]]
    await twin.aadd_documents([Document("A new document.", id="id0")])
    await twin.adelete(["id1"])
    assert texts(await twin.aget_by_ids(["id0", "id1"])) == ["A new document."]
    assert engine.stored([named[0].page_content, named[1].page_content]) == [False, False]


def test_what_is_saved_comes_back(engine: BlendEngine, store: BlendVectorStore, named: list[Document],
                                  tmp_path: Path) -> None:
    store.delete(["id3"])
    store.save_local(tmp_path / "new", "corpus")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["corpus.npz"]
    back = BlendVectorStore.load_local(tmp_path / "new", EMBEDDINGS, "corpus", engine=engine)
    assert back.get_by_ids(["id0", "id1", "id2"]) == named[:3]
    for document in named[:3]:
        assert back.similarity_search(document.page_content, k=1) == [document]
    back.delete(["id0"])
    assert engine.stored([named[0].page_content]) == [False]
    empty = BlendVectorStore(EMBEDDINGS, engine=engine)
    empty.save_local(tmp_path)
    assert len(BlendVectorStore.load_local(tmp_path, EMBEDDINGS, engine=engine)) == 0


def test_what_cannot_be_saved_or_loaded_is_named(engine: BlendEngine, store: BlendVectorStore, tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="name the folder that save_local wrote"):
        BlendVectorStore.load_local(tmp_path, EMBEDDINGS, engine=engine)
    np.savez(tmp_path / "index.npz", vectors=np.array([print], dtype=object), documents=np.zeros(0, np.uint8))
    with pytest.raises(DocumentError, match="damaged"):
        BlendVectorStore.load_local(tmp_path, EMBEDDINGS, engine=engine)
    store.save_local(tmp_path)
    other = BlendVectorStore.load_local(tmp_path, DeterministicFakeEmbedding(size=9), engine=engine)
    with pytest.raises(DocumentError, match="have 9 dimensions, those in the store 8"):
        other.add_texts(["A text."])
    store.add_documents([Document("A text.", metadata={"lock": threading.Lock()})])
    with pytest.raises(DocumentError, match="cannot be saved"):
        store.save_local(tmp_path)
    assert len(BlendVectorStore.load_local(tmp_path, EMBEDDINGS, engine=engine)) == 4


@pytest.mark.parametrize("cleanup", ["incremental", "full"])
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_langchains_indexing_keeps_kv_in_step(engine: BlendEngine, named: list[Document], cleanup: Any,
                                                    asynchronous: bool) -> None:
    store = BlendVectorStore(EMBEDDINGS, engine=engine)
    records = InMemoryRecordManager(f"{cleanup}{asynchronous}")
    records.create_schema()

    async def update(documents: list[Document]) -> Any:
        bare = [Document(one.page_content, metadata={"source": str(one.metadata["number"])}) for one in documents]
        settings: Any = {"cleanup": cleanup, "source_id_key": "source", "key_encoder": "sha256"}
        return (await aindex(bare, records, store, **settings) if asynchronous
                else index(bare, records, store, **settings))

    assert (await update(named))["num_added"] == 4
    assert (await update(named))["num_skipped"] == 4
    changed = named[0].model_copy(update={"page_content": f"Second edition. {named[0].page_content}"})
    result = await update([changed, *named[1:]])
    assert (result["num_added"], result["num_deleted"], result["num_skipped"]) == (1, 1, 3)
    assert engine.stored(texts([named[0], changed, *named[1:]])) == [False, True, True, True, True]
    await update([changed])
    assert engine.stored(texts(named[1:])) == [cleanup == "incremental"] * 3
    store.delete()


def test_metadata_in_the_prompt_is_in_the_stored_chunk(engine: BlendEngine, named: list[Document]) -> None:
    shown = PromptTemplate.from_template("No. {number}: {page_content}")
    store = BlendVectorStore.from_documents(named, EMBEDDINGS, engine=engine, document_prompt=shown)
    chunks = [shown.format(number=one.metadata["number"], page_content=one.page_content) for one in named]
    assert engine.stored(chunks) == [True] * 4
    chain = store.as_retriever() | RunnableLambda(lambda found: format_documents(found, document_prompt=shown))
    answer = (chain | ChatBlend(engine=engine, temperature=0, max_tokens=4)).invoke("Which river?")
    assert answer.response_metadata["blend"]["chunks_reused"] == 4
    store.delete()
    assert engine.stored(chunks) == [False] * 4


def test_threads_may_write_and_read_at_once(engine: BlendEngine) -> None:
    store = BlendVectorStore(EMBEDDINGS, engine=engine)

    def work(number: int) -> int:
        store.add_texts([f"Text {number}", f"More of {number}"], ids=[f"a{number}", f"b{number}"])
        store.delete([f"b{number}"])
        return len(store.similarity_search(f"Text {number}", k=1))

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(work, range(24))) == {1}
    assert len(store) == 24
    assert len(store.get_by_ids([f"a{number}" for number in range(24)])) == 24


def test_it_needs_one_engine(engine: BlendEngine) -> None:
    for arguments in ({}, {"engine": engine, "llm": ChatBlend(engine=engine)}):
        with pytest.raises(ConfigError, match="pass it as llm=, or its engine as engine="):
            BlendVectorStore(EMBEDDINGS, **arguments)  # type: ignore[arg-type]
    store = BlendVectorStore.from_texts([], EMBEDDINGS, llm=ChatBlend(model="never/started"))
    assert (len(store), bool(store), store.similarity_search("anything")) == (0, True, [])
