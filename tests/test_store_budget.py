"""The disk tier stays within its budget: the least recently used entries leave, and whoever misses them sees a miss."""

import sqlite3

import pytest

from blendrag.errors import StoreError
from blendrag.store import ChunkStore, entry_key, open_store, prefix_digest
from tests.test_store_disk import files_in
from tests.test_store_entry import find, make_entry, make_key, put, put_findable, same
from tests.test_store_processes import run


def file_size(path):
    """Size of the file of an entry as the tests make them."""
    with ChunkStore(path / "measured") as store:
        put(store, 1, make_entry(1))
        return store.stats.disk_bytes


@pytest.fixture
def size(tmp_path):
    return file_size(tmp_path)


def test_the_least_recently_used_entry_makes_room(tmp_path, size):
    with ChunkStore(tmp_path / "store", disk_bytes=2 * size) as store:
        a, b = put(store, 1, make_entry(1)), put(store, 2, make_entry(2))
        assert store.get(a)
        c = put(store, 3, make_entry(3))
        assert store.keys() == sorted([a, c])
        assert store.get(b) is None
        stats = store.stats
        assert (stats.disk_entries, stats.disk_bytes, stats.disk_evicted) == (2, 2 * size, 1)
        assert (stats.ram_entries, stats.evicted, stats.damaged) == (2, 0, 0)
    assert len(files_in(tmp_path / "store")) == 2


def test_use_is_remembered_over_a_restart(tmp_path, size):
    with ChunkStore(tmp_path / "store", disk_bytes=2 * size) as store:
        a, b = put(store, 1, make_entry(1)), put(store, 2, make_entry(2))
        assert store.get(a)
    with ChunkStore(tmp_path / "store", disk_bytes=2 * size) as store:
        put(store, 3, make_entry(3))
        assert store.present([a, b]) == {a}


def test_an_entry_larger_than_the_budget_is_not_kept_and_displaces_nothing(tmp_path, size):
    with ChunkStore(tmp_path / "store", disk_bytes=size) as store:
        key = put(store, 1, make_entry(1))
        for shape in ((2, 500, 3, 8), (2, 6, 3, 8)):  # of the second, only the file is too large
            large = put(store, 2, make_entry(2, shape))
            assert large not in store
            assert store.get(large) is None
        assert store.keys() == [key]
        assert (store.stats.disk_evicted, store.stats.ram_entries) == (0, 1)
    assert len(files_in(tmp_path / "store")) == 1


def test_a_smaller_budget_counts_from_the_next_put(tmp_path, size):
    with ChunkStore(tmp_path / "store") as store:
        for number in range(1, 6):
            put(store, number, make_entry(number))
    with ChunkStore(tmp_path / "store", disk_bytes=2 * size) as store:
        assert store.stats.disk_entries == 5
        put(store, 5, make_entry(5))
        put(store, 6, make_entry(6))
        assert store.keys() == sorted([make_key(5), make_key(6)])
        assert store.stats.disk_evicted == 4


def test_a_budget_of_nothing_keeps_nothing(tmp_path):
    with ChunkStore(tmp_path, disk_bytes=0) as store:
        assert store.get(put(store, 1, make_entry(1))) is None
    with pytest.raises(StoreError, match="disk_bytes is -1: set it to 0 or more"):
        ChunkStore(tmp_path, disk_bytes=-1)


def test_what_made_room_is_no_longer_found_and_can_come_back(tmp_path):
    with ChunkStore(tmp_path / "measured") as store:
        put_findable(store, 1)
        size = store.stats.disk_bytes
    with ChunkStore(tmp_path / "store", disk_bytes=2 * size) as store:
        a, b = put_findable(store, 1), put_findable(store, 2)
        assert find(store, 1, 2) == [a, b]
        c = put_findable(store, 3)
        assert find(store, 1, 2, 3) == [b, c]
        put_findable(store, 1)
        assert find(store, 1, 2, 3) == [a, c]


def child_read_what_left(path, budget):
    with ChunkStore(path) as reader, ChunkStore(path, ram_bytes=0) as without_ram:
        key, row = make_key(1), reader._disk.manifest.row(make_key(1))
        assert reader.get(key)
        with ChunkStore(path, disk_bytes=budget) as writer:
            put(writer, 2, make_entry(2))
        assert reader.get(key) is None
        assert reader._disk.read(row, pin=False) is None  # it was looked up before it left
        assert without_ram.get(key) is None
        assert reader.stats.damaged == without_ram.stats.damaged == 0
        assert same(reader.get(make_key(2)), make_entry(2))


def test_other_processes_see_a_miss(tmp_path, size):
    with ChunkStore(tmp_path / "store", disk_bytes=size) as store:
        key = put(store, 1, make_entry(1))
        run(child_read_what_left, tmp_path / "store", size)
        assert store.get(key) is None
        assert store.stats.damaged == 0


@pytest.mark.parametrize("budgets", [(1, 2), (2, 1), (2, 2)])
def test_the_largest_budget_of_all_users_counts(tmp_path, size, budgets):
    first, second = (open_store(tmp_path / "store", disk_bytes=number * size) for number in budgets)
    with first, second:
        for number in (1, 2, 3):
            put(first, number, make_entry(number))
        assert first.keys() == sorted([make_key(2), make_key(3)])


@pytest.mark.parametrize("budgets", [(None, 1), (1, None), (None, None)])
def test_no_budget_is_the_largest(tmp_path, size, budgets):
    first, second = (open_store(tmp_path / "store", disk_bytes=number and number * size) for number in budgets)
    with first, second, open_store(tmp_path / "store", disk_bytes=0):
        for number in (1, 2, 3):
            put(first, number, make_entry(number))
        assert len(first.keys()) == 3


def test_a_put_that_fails_displaces_nothing(tmp_path, size, monkeypatch):
    with ChunkStore(tmp_path / "store", ram_bytes=0, disk_bytes=size) as store:
        key = put(store, 1, make_entry(1))
        with monkeypatch.context() as patch:
            patch.setattr("blendrag.store.writing.Writing.add", broken)
            with pytest.raises(StoreError, match="has no space left"):
                put(store, 2, make_entry(2))
        assert same(store.get(key), make_entry(1))
        assert (store.stats.disk_evicted, store.stats.disk_entries) == (0, 1)


def broken(*_):
    raise OSError(28, "no space")


def test_the_manifest_counts_what_is_there(tmp_path):
    with ChunkStore(tmp_path) as store:
        for number in range(1, 5):
            put(store, number, make_entry(number))
        store.delete(make_key(1))
        connection = sqlite3.connect(tmp_path / "manifest.sqlite3")
        counted = connection.execute("SELECT count(*), sum(bytes) FROM entries").fetchall()
        connection.close()
        assert counted == [(store.stats.disk_entries, store.stats.disk_bytes)]


def put_in(store, number, namespace):
    key = entry_key("model", namespace, prefix_digest(), [number])
    store.put(key, make_entry(number), fingerprint="model", namespace=namespace)
    return key


def test_a_namespace_over_its_quota_makes_room_among_its_own_scopes(tmp_path, size):
    room = int(2.5 * size)
    with ChunkStore(tmp_path / "store", quotas={"acme": room}) as store:
        others = [put_in(store, number, "other") for number in range(3)] + [put_in(store, 9, "acmes")]
        first, second, third = (put_in(store, number, namespace)
                                for number, namespace in enumerate(("acme", "acme:salt", "acme:salt")))
        assert store.present([first, second, third, *others]) == {second, third, *others}
        fourth = put_in(store, 4, "acme")
        assert store.present([second, third, fourth, *others]) == {third, fourth, *others}
        assert store.clear("acme") == 2
        assert store.present([third, fourth, *others]) == set(others)


def test_an_entry_larger_than_its_namespaces_quota_is_not_kept(tmp_path, size):
    with ChunkStore(tmp_path / "store", quotas={"acme": size // 2}) as store:
        assert put_in(store, 1, "acme:salt") not in store
        assert put_in(store, 1, "other") in store


def test_the_quotas_of_the_latest_user_count(tmp_path, size):
    with open_store(tmp_path / "store"), open_store(tmp_path / "store", quotas={"acme": size // 2}) as store:
        assert put_in(store, 1, "acme") not in store


def test_clearing_a_namespace_in_ram_clears_its_scopes():
    with ChunkStore() as store:
        keys = [put_in(store, number, namespace) for number, namespace in enumerate(("acme", "acme:salt", "acmes"))]
        assert store.clear("acme") == 2
        assert store.keys() == [keys[2]]
