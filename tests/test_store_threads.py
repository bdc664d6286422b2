"""Threads share a store without waiting for each other's files."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from blendrag.errors import StoreError
from blendrag.store import ChunkStore, disk
from tests.test_store_entry import CHUNK, find, make_entry, make_key, put, put_findable, same

ENTRIES = [make_entry(number) for number in range(8)]
BUDGET = 3 * ENTRIES[0].nbytes


@pytest.mark.parametrize("on_disk", [False, True])
def test_threads_see_whole_entries_and_the_budget_holds(tmp_path, on_disk):
    with ChunkStore(tmp_path if on_disk else None, ram_bytes=BUDGET) as store:

        def work(seed):
            chance = random.Random(seed)
            for _ in range(40):
                number = chance.randrange(len(ENTRIES))
                action = chance.choice(["put", "get", "get", "get", "delete", "in"])
                if action == "put":
                    put(store, number, ENTRIES[number])
                elif action == "delete":
                    store.delete(make_key(number))
                elif action == "in":
                    assert (make_key(number) in store) in (True, False)
                else:
                    found = store.get(make_key(number))
                    assert found is None or same(found, ENTRIES[number])
                assert store.stats.ram_bytes <= BUDGET

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(work, range(6)))
        assert store.stats.damaged == 0
        assert all(map(store.get, store.keys()))


@pytest.mark.parametrize("on_disk", [False, True])
def test_threads_find_what_is_stored_while_others_store_and_delete(tmp_path, on_disk):
    budget = 4 * make_entry(0, (1, CHUNK, 1, 2)).nbytes
    with ChunkStore(tmp_path if on_disk else None, ram_bytes=budget) as store:

        def work(seed):
            chance = random.Random(seed)
            for _ in range(30):
                number = chance.randrange(6)
                if chance.random() < 0.4:
                    store.delete(put_findable(store, number))
                elif chance.random() < 0.5:
                    put_findable(store, number)
                else:
                    assert len(find(store, *range(6))) <= 6

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        assert sorted(find(store, *range(6))) == store.keys()


def test_reads_do_not_wait_for_a_write(tmp_path, monkeypatch):
    writing, go_on = threading.Event(), threading.Event()

    def slow_write(*args):
        writing.set()
        assert go_on.wait(30)
        return real_write(*args)

    real_write = disk.write_entry
    with ChunkStore(tmp_path, ram_bytes=0) as store, ThreadPoolExecutor(1) as pool:
        key = put(store, 1, ENTRIES[1])
        monkeypatch.setattr(disk, "write_entry", slow_write)
        write = pool.submit(put, store, 2, ENTRIES[2])
        assert writing.wait(30)
        assert same(store.get(key), ENTRIES[1])
        assert make_key(2) not in store
        assert store.delete(key)
        go_on.set()
        assert same(store.get(write.result()), ENTRIES[2])


def test_reads_do_not_wait_for_a_commit(tmp_path):
    with ChunkStore(tmp_path, ram_bytes=0) as store:
        key = put(store, 1, ENTRIES[1])
        with store._disk.manifest.writing():
            assert same(store.get(key), ENTRIES[1])
            assert key in store


def test_a_store_that_is_closed_meanwhile_ends_other_threads_uses_with_its_own_error(tmp_path):
    store = ChunkStore(tmp_path)
    started = threading.Barrier(4)

    def work(number):
        started.wait()
        while True:
            store.get(put(store, number, ENTRIES[number]))

    with ThreadPoolExecutor(3) as pool:
        uses = [pool.submit(work, number) for number in range(3)]
        started.wait()
        store.close()
        errors = [use.exception() for use in uses]
    assert all(isinstance(error, StoreError) and "is closed" in str(error) for error in errors)
