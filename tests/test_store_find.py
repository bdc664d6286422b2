"""A store finds in a prompt the chunks that it holds at that moment, whoever stored them, and no others."""

import sqlite3

import pytest

from blendrag.errors import StoreError
from blendrag.store import ChunkStore, Match, manifest, open_store, prefix_digest
from tests.test_store_disk import file_of, flip
from tests.test_store_entry import CHUNK, find, make_entry, make_ids, make_key, put, put_findable, same
from tests.test_store_processes import run

P = prefix_digest([1])
SIZE = make_entry(1, (1, CHUNK, 1, 2)).nbytes


@pytest.fixture(params=[False, True], ids=["ram", "disk"])
def store(request, tmp_path):
    with ChunkStore(tmp_path if request.param else None) as opened:
        yield opened


def test_a_stored_chunk_is_found_in_any_prompt(store):
    key = put_findable(store, 1)
    assert store.find([5, *make_ids(1), 6], fingerprint="model", namespace="default") == [
        Match(1, CHUNK + 1, 0, CHUNK, {prefix_digest(): key})]
    assert find(store, 1, 2, 1) == [key, key]


def test_a_chunk_has_a_variant_for_each_prefix(store):
    keys = {prefix: put_findable(store, 1, prefix) for prefix in (P, prefix_digest())}
    [match] = store.find(make_ids(1), fingerprint="model", namespace="default")
    assert match.variants == keys
    store.delete(keys[P])
    [match] = store.find(make_ids(1), fingerprint="model", namespace="default")
    assert match.variants == {prefix_digest(): keys[prefix_digest()]}


def test_models_and_namespaces_find_their_own_chunks(store):
    keys = {(f, n): put_findable(store, 1, None, f, n) for f in ("m1", "m2") for n in ("n1", "n2")}
    for (fingerprint, namespace), key in keys.items():
        assert find(store, 1, fingerprint=fingerprint, namespace=namespace) == [key]
    assert find(store, 1, fingerprint="m1", namespace="n3") == []


def test_what_was_stored_without_ids_is_not_found(store):
    key = put(store, 1, make_entry(1))
    assert find(store, 1) == []
    assert key in store


def test_the_index_is_in_step_with_puts_deletions_and_clearing(store):
    assert find(store, 1, 2, 3) == []
    first, second = put_findable(store, 1), put_findable(store, 2)
    assert find(store, 1, 2, 3) == [first, second]
    put_findable(store, 2)
    third = put_findable(store, 3)
    assert store.delete(first)
    assert find(store, 1, 2, 3) == [second, third]
    assert put_findable(store, 1) == first
    assert find(store, 1, 2, 3) == [first, second, third]
    store.clear(namespace="default")
    assert find(store, 1, 2, 3) == []
    put_findable(store, 3)
    assert find(store, 1, 2, 3) == [third]


def test_prefix_and_ids_are_given_together_and_are_the_entrys(store):
    for more, problem in (({"prefix": P}, "pass both, or neither"), ({"ids": [1] * 5}, "pass both, or neither"),
                          ({"prefix": P, "ids": [1] * 4}, "4 ids were given for an entry of 5 tokens"),
                          ({"prefix": P, "ids": [1, 2, 3, 4, -1]}, "between 0 and")):
        with pytest.raises(StoreError, match=problem):
            store.put(make_key(1), make_entry(1), fingerprint="model", namespace="default", **more)
    assert store.keys() == []


def test_what_leaves_ram_for_good_is_no_longer_found():
    with ChunkStore(ram_bytes=2 * SIZE) as store:
        first, second = put_findable(store, 1), put_findable(store, 2)
        assert store.get(first)
        third = put_findable(store, 3)
        assert find(store, 1, 2, 3) == [first, third]
        assert second not in store
    with ChunkStore(ram_bytes=SIZE - 1) as store:
        put_findable(store, 1)
        assert find(store, 1) == []


def test_what_leaves_ram_but_is_on_the_disk_is_found(tmp_path):
    with ChunkStore(tmp_path, ram_bytes=0) as store:
        assert find(store, 1) == [] == find(store, 2)
        assert [put_findable(store, 1)] == find(store, 1)


def test_chunks_are_found_after_a_restart(tmp_path):
    with ChunkStore(tmp_path) as store:
        keys = [put_findable(store, number) for number in (1, 2)]
    with ChunkStore(tmp_path) as store:
        assert find(store, 2, 1) == keys[::-1]


def test_a_damaged_chunk_is_found_until_it_is_read(tmp_path):
    with ChunkStore(tmp_path, ram_bytes=0) as store:
        key = put_findable(store, 1)
        flip(tmp_path / store._disk.manifest.row(key).file)
        assert find(store, 1) == [key]
        assert store.get(key) is None
        assert find(store, 1) == []


def child_put_findable(path, *numbers):
    with ChunkStore(path) as store:
        for number in numbers:
            put_findable(store, number)


def child_delete_found(path, number):
    with ChunkStore(path) as store:
        [key] = find(store, number)
        assert store.delete(key)


def child_clear(path):
    with ChunkStore(path) as store:
        assert store.clear() == 2


def test_what_other_processes_store_and_remove_is_followed(tmp_path):
    with ChunkStore(tmp_path) as store:
        assert find(store, 1, 2) == []
        run(child_put_findable, tmp_path, 1, 2)
        assert len(find(store, 1, 2)) == 2
        run(child_delete_found, tmp_path, 1)
        [second] = find(store, 1, 2)
        run(child_put_findable, tmp_path, 1)
        assert second in find(store, 1, 2)
        assert len(find(store, 1, 2)) == 2
        run(child_clear, tmp_path)
        assert find(store, 1, 2) == []


def test_a_store_that_has_not_looked_for_long_starts_again(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "REMEMBERED", 3)
    with ChunkStore(tmp_path) as store, ChunkStore(tmp_path) as other:
        change_trigger(tmp_path, 3)
        kept = put_findable(other, 1)
        gone = [put_findable(other, number) for number in range(2, 8)]
        assert find(store, *range(1, 8)) == [kept, *gone]
        for key in gone:
            other.delete(key)
        late = put_findable(other, 9)
        assert find(store, *range(1, 10)) == [kept, late]
        assert find(other, *range(1, 10)) == [kept, late]
    connection = sqlite3.connect(tmp_path / "manifest.sqlite3")
    assert connection.execute("SELECT count(*) FROM removed").fetchall() == [(3,)]
    connection.close()


def change_trigger(path, remembered):
    connection = sqlite3.connect(path / "manifest.sqlite3")
    ((sql,),) = connection.execute("SELECT sql FROM sqlite_master WHERE name = 'findable_removed'").fetchall()
    connection.execute("DROP TRIGGER findable_removed")
    connection.execute(sql.replace("10000", str(remembered)))
    connection.commit()
    connection.close()


def test_a_first_look_comes_in_pages(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "_PAGE", 2)
    with ChunkStore(tmp_path) as store:
        keys = [put_findable(store, number) for number in range(1, 6)]
        put_findable(store, 6, namespace="other")
        assert find(store, *range(1, 7)) == keys


# Stores of schema 1.


def make_schema_1(path):
    """What blendrag 0.1 wrote."""
    with ChunkStore(path) as store:
        for number in (1, 2):
            put(store, number, make_entry(number))
    connection = sqlite3.connect(path / "manifest.sqlite3", isolation_level=None)
    for trigger in ("entry_added", "entry_removed", "findable_removed"):
        connection.execute(f"DROP TRIGGER {trigger}")
    for table in ("findable", "removed", "totals"):
        connection.execute(f"DROP TABLE {table}")
    connection.execute("DROP INDEX entries_by_use")
    connection.execute("PRAGMA user_version = 1")
    connection.close()


def test_a_store_of_schema_1_is_brought_up_to_date(tmp_path):
    make_schema_1(tmp_path)
    for _ in range(2):
        with ChunkStore(tmp_path) as store:
            assert same(store.get(make_key(1)), make_entry(1))
            assert (store.stats.disk_entries, store.stats.disk_bytes) == (
                2, sum(file_of(tmp_path, number).stat().st_size for number in (1, 2)))
            key = put_findable(store, 3)
            assert find(store, 1, 2, 3) == [key]
            store.delete(key)


def test_who_opens_a_store_of_schema_1_at_the_same_time_finds_one_of_schema_2(tmp_path):
    make_schema_1(tmp_path)
    with open_store(tmp_path) as store, ChunkStore(tmp_path) as other:
        assert find(store, 1) == find(other, 1) == []
        assert [put_findable(store, 1)] == find(other, 1)
