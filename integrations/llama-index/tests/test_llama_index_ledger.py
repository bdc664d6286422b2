"""What is known of the documents that stored chunks came from; no engine starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from blendrag import BlendConfig
from blendrag.errors import StoreError

from llama_index.ingestion.blendrag import BlendIngestion
from llama_index.ingestion.blendrag.ledger import Ledger
from llama_index.llms.blendrag import BlendLLM


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "kv", "scope")


def test_it_is_shared_by_folder_and_separated_by_scope(ledger: Ledger, tmp_path: Path) -> None:
    assert ledger.add("a", {"d": "1"}, {"d": ["x", "y"]}) == []
    assert Ledger(tmp_path / "kv", "scope").documents("a") == {"d"}
    assert Ledger(tmp_path / "kv", "other").documents("a") == set()
    assert ledger.documents("b") == set()


def test_a_chunk_of_another_collection_is_in_use(ledger: Ledger) -> None:
    ledger.add("a", {"d": "1"}, {"d": ["x", "y"]})
    ledger.add("b", {"d": "1"}, {"d": ["y"]})
    assert ledger.remove("a", ["d"]) == ["x"]
    assert ledger.remove("b", ["d"]) == ["y"]


def test_a_new_version_replaces_the_old_one(ledger: Ledger) -> None:
    ledger.add("a", {"d": "1", "e": "1"}, {"d": ["x", "y"], "e": ["z"]})
    assert ledger.add("a", {"d": "2"}, {"d": ["y", "w"]}) == ["x"]
    assert ledger.add("a", {"d": "3"}, {}) == ["w", "y"]


def test_its_state_changes_when_something_is_forgotten(ledger: Ledger) -> None:
    before = ledger.state
    ledger.add("a", {"d": "1"}, {"d": ["x"]})
    assert ledger.state == before
    ledger.remove("a", ["d"])
    assert ledger.state != before


def test_a_file_that_is_no_ledger_is_named(tmp_path: Path) -> None:
    (tmp_path / "llama_index_documents.sqlite").write_text("not a database, but as long as a header of one is")
    with pytest.raises(StoreError, match="choose another store_path"):
        Ledger(tmp_path, "scope")


def test_the_cache_key_holds_model_and_settings(tmp_path: Path) -> None:
    def key(**fields: Any) -> Any:
        return BlendIngestion(BlendLLM(**{"model": "m", "config": {"store_path": tmp_path}} | fields)).to_dict()

    keys = [key(), key(model="n"), key(config={"store_path": tmp_path, "namespace": "other"}),
            key(engine_args={"dtype": "half"}), key(config={"store_path": tmp_path / "other"})]
    assert all(keys.count(one) == 1 for one in keys)
    assert key() == keys[0]
    assert key(temperature=0.3) == keys[0]


def test_the_ledger_stands_beside_a_store_on_disk(tmp_path: Path) -> None:
    llm = BlendLLM("no/such-model", config=BlendConfig(store_path=tmp_path / "kv"))
    BlendIngestion(llm).to_dict()
    assert (tmp_path / "kv" / "llama_index_documents.sqlite").exists()
