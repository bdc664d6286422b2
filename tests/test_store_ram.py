"""The RAM tier holds the most recently used entries that fit, and never more bytes than its budget."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendrag.errors import StoreError
from blendrag.store import ChunkStore, KVEntry
from blendrag.store.ram import Owner, RamTier
from tests.test_store_entry import make_entry, make_key, put, same

TINY = KVEntry(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))
OWNER = Owner("model", "default")
SIZE = make_entry(0).nbytes

keys = st.sampled_from("abcde")
actions = st.one_of(
    st.tuples(st.just("put"), keys, st.integers(1, 12)),
    st.tuples(st.sampled_from(["get", "remove"]), keys, st.just(0)),
)


@given(st.integers(0, 10), st.lists(actions))
def test_the_tier_equals_a_plain_list_with_the_least_recent_first(budget, history):
    tier, model, evicted = RamTier(budget), [], 0
    for action, key, size in history:
        held = next((item for item in model if item[0] == key), None)
        if action == "get":
            assert (tier.get(key) is not None) == (held is not None)
        elif action == "remove":
            assert tier.remove(key) == (held is not None)
        else:
            tier.put(key, TINY, OWNER, size)
        if held:
            model.remove(held)
        if action == "get" and held:
            model.append(held)
        if action == "put" and size <= budget:
            while sum(item[1] for item in model) + size > budget:
                evicted += 1
                model.pop(0)
            model.append((key, size))
        assert tier.keys() == [item[0] for item in model]
        assert tier.bytes == sum(item[1] for item in model) <= budget
        assert (tier.evicted, len(tier)) == (evicted, len(model))


def test_the_least_recently_used_entry_makes_room():
    with ChunkStore(ram_bytes=2 * SIZE) as store:
        a, b = put(store, 1, make_entry(1)), put(store, 2, make_entry(2))
        assert store.get(a)
        c = put(store, 3, make_entry(3))
        assert store.present([a, b, c]) == {a, c}
        assert store.get(b) is None
        assert (store.stats.evicted, store.stats.ram_bytes, store.stats.entries) == (1, 2 * SIZE, 2)


def test_what_leaves_ram_is_still_on_the_disk(tmp_path):
    with ChunkStore(tmp_path, ram_bytes=SIZE) as store:
        a, b = put(store, 1, make_entry(1)), put(store, 2, make_entry(2))
        assert same(store.get(a), make_entry(1))  # from the disk: promoted, which evicts b
        assert same(store.get(a), make_entry(1))
        assert same(store.get(b), make_entry(2))
        stats = store.stats
        assert (stats.hits_disk, stats.hits_ram, stats.misses, stats.entries) == (2, 1, 0, 2)


def test_an_entry_larger_than_the_budget_displaces_nothing(tmp_path):
    large = make_entry(2, (2, 50, 3, 8))
    for store, kept in ((ChunkStore(ram_bytes=SIZE), None), (ChunkStore(tmp_path, ram_bytes=SIZE), large)):
        with store:
            small, key = put(store, 1, make_entry(1)), put(store, 2, large)
            assert same(store.get(key), kept)
            assert (key in store) == (kept is not None)
            assert same(store.get(small), make_entry(1))
            assert store.stats.hits_ram == 1


def test_a_budget_of_nothing_leaves_the_disk_alone_to_serve(tmp_path):
    with ChunkStore(tmp_path, ram_bytes=0) as store:
        key = put(store, 1, make_entry(1))
        assert same(store.get(key), make_entry(1))
        assert (store.stats.ram_entries, store.stats.hits_disk) == (0, 1)


def test_a_budget_below_nothing_is_refused():
    with pytest.raises(StoreError, match="set it to 0 or more"):
        ChunkStore(ram_bytes=-1)


@pytest.mark.parametrize("on_disk", [False, True])
def test_entries_are_cleared_by_namespace_and_by_model(tmp_path, on_disk):
    with ChunkStore(tmp_path if on_disk else None) as store:
        put_one = {(f, n): put(store, 1, make_entry(1), f, n) for f in ("m1", "m2") for n in ("n1", "n2", "n3")}
        assert store.clear(namespace="n1", fingerprint="m1") == 1
        assert store.clear(namespace="n1", fingerprint="m1") == 0
        assert store.clear(namespace="n2") == 2
        assert store.clear(fingerprint="m2") == 2
        left = [put_one["m1", "n3"]]
        assert store.keys() == left
        assert [key for key in put_one.values() if store.get(key)] == left
        assert store.clear() == 1
        assert (store.keys(), store.stats.entries, store.stats.ram_bytes) == ([], 0, 0)


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_deleted_entry_is_gone_and_can_come_back(tmp_path, on_disk):
    with ChunkStore(tmp_path if on_disk else None) as store:
        key = put(store, 1, make_entry(1))
        assert store.delete(key)
        assert not store.delete(key)
        assert key not in store
        assert store.get(key) is None
        put(store, 1, make_entry(1))
        assert same(store.get(key), make_entry(1))


def test_unknown_keys_are_misses(tmp_path):
    for store in (ChunkStore(), ChunkStore(tmp_path)):
        with store:
            for key in (make_key(1), "", "no key", "' OR 1=1 --"):
                assert key not in store
                assert store.get(key) is None
            assert store.stats.misses == 4
