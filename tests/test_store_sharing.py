"""Parts of one process that open the same store get the same object, which closes with its last user."""

import gc

import pytest

from blendrag.errors import StoreError
from blendrag.store import ChunkStore, open_store
from tests.test_store_entry import find, make_entry, make_key, put, same

SIZE = make_entry(0).nbytes


def test_the_same_path_is_the_same_store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "store")
    with open_store(tmp_path / "store") as store:
        for spelling in ("store", str(tmp_path / "x" / ".." / "store"), tmp_path / "link"):
            with open_store(spelling) as other:
                assert other is store
        with open_store(tmp_path / "another") as other:
            assert other is not store


def test_a_store_without_a_path_is_known_by_its_name():
    with open_store(name="engine-1") as store, open_store(name="engine-1") as same_one, open_store(name="2") as other:
        assert store is same_one
        assert store is not other


def test_a_store_with_neither_is_new():
    with open_store() as store, open_store() as other:
        assert store is not other


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_store_closes_with_its_last_user(tmp_path, on_disk):
    known = {"path": tmp_path} if on_disk else {"name": "engine"}
    first, second = open_store(**known), open_store(**known)
    key = put(first, 1, make_entry(1))
    first.close()
    assert same(second.get(key), make_entry(1))
    second.close()
    with pytest.raises(StoreError, match="is closed: open it again"):
        second.get(key)
    with open_store(**known) as again:
        assert again is not first
        assert (key in again) == on_disk


def test_the_largest_budget_of_all_users_counts():
    with open_store(name="engine", ram_bytes=SIZE) as store:
        with open_store(name="engine", ram_bytes=2 * SIZE), open_store(name="engine", ram_bytes=0):
            pass
        keys = [put(store, number, make_entry(number)) for number in (1, 2, 3)]
        assert store.present(keys) == set(keys[1:])


def test_a_forgotten_store_is_not_kept_alive():
    store = open_store(name="engine")
    put(store, 1, make_entry(1))
    del store
    gc.collect()
    with open_store(name="engine") as again:
        assert again.keys() == []


@pytest.mark.parametrize("on_disk", [False, True])
def test_after_closing_every_use_is_an_error(tmp_path, on_disk):
    store = ChunkStore(tmp_path if on_disk else None)
    key = put(store, 1, make_entry(1))
    store.close()
    store.close()
    uses = [
        lambda: store.get(key), lambda: put(store, 2, make_entry(2)), lambda: key in store, lambda: store.delete(key),
        lambda: store.clear(), lambda: store.keys(), lambda: store.stats, lambda: store.present([key]),
        lambda: find(store, 1),
    ]
    for use in uses:
        with pytest.raises(StoreError, match="is closed: open it again"):
            use()


def test_a_key_and_a_fingerprint_can_name_a_file():
    with ChunkStore() as store:
        for key, fingerprint, problem in (
            ("../../etc/passwd", "model", "is no key"),
            (make_key(1).upper(), "model", "is no key"),
            (make_key(1), "..", "is no fingerprint"),
            (make_key(1), "a/b", "is no fingerprint"),
            (make_key(1), "", "is no fingerprint"),
        ):
            with pytest.raises(StoreError, match=problem):
                store.put(key, make_entry(1), fingerprint=fingerprint, namespace="default")
        assert store.keys() == []
