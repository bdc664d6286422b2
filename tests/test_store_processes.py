"""Several processes share one folder, and any of them may be killed at any moment."""

import itertools
import multiprocessing
import os
import random
import shutil
import signal
import sys

import pytest

from blendrag.errors import StoreError
from blendrag.store import ChunkStore, disk, open_store
from blendrag.store.rows import NewEntry
from blendrag.store.tensorfile import write_entry
from tests.test_store_disk import files_in, flip, rows_in
from tests.test_store_entry import make_entry, make_key, put, same

# A server without threads, which has torch loaded, forks the children: quick, and safe beside a running engine.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["pytest", "torch", "safetensors.torch", "blendrag.store"])


def start(function, *args):
    child = processes.Process(target=function, args=args)
    child.start()
    return child


def finish(*children):
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * len(children)


def run(function, *args):
    finish(start(function, *args))


def child_put(path, *numbers):
    with ChunkStore(path) as store:
        for number in numbers:
            put(store, number, make_entry(number))


def child_delete(path, number):
    with ChunkStore(path) as store:
        assert store.delete(make_key(number))


def child_clear(path):
    with ChunkStore(path) as store:
        store.clear(namespace="default")


def child_work_on_the_same_keys(path, seed):
    chance = random.Random(seed)
    with ChunkStore(path, ram_bytes=3 * make_entry(0).nbytes) as store:
        for _ in range(30):
            number = chance.randrange(4)
            found = store.get(make_key(number))
            assert found is None or any(same(found, make_entry(10 * number + writer)) for writer in range(3))
            if chance.random() < 0.5:
                put_as(store, number, seed)
            elif chance.random() < 0.3:
                store.delete(make_key(number))
        assert store.stats.damaged == 0


def put_as(store, number, writer):
    """Writers disagree about the last bits, as kernels do at other batch sizes."""
    store.put(make_key(number), make_entry(10 * number + writer), fingerprint="model", namespace="default")


def test_what_another_process_wrote_is_there_at_once(tmp_path):
    with ChunkStore(tmp_path) as store:
        assert make_key(1) not in store
        run(child_put, tmp_path, 1, 2)
        assert make_key(1) in store
        assert store.present([make_key(n) for n in (1, 2, 3)]) == {make_key(1), make_key(2)}
        assert same(store.get(make_key(2)), make_entry(2))


@pytest.mark.parametrize("removal", [(child_delete, 1), (child_clear,)])
def test_what_another_process_removed_is_not_served_from_ram(tmp_path, removal):
    with ChunkStore(tmp_path) as store:
        key = put(store, 1, make_entry(1))
        assert store.get(key)
        function, *args = removal
        run(function, tmp_path, *args)
        assert key not in store
        assert store.get(key) is None
        assert store.stats.ram_entries == 0
        assert store.stats.damaged == 0
        put(store, 1, make_entry(1))
        assert same(store.get(key), make_entry(1))


def test_processes_that_write_read_and_delete_the_same_keys_never_see_damage(tmp_path):
    finish(*(start(child_work_on_the_same_keys, tmp_path, seed) for seed in range(3)))
    with ChunkStore(tmp_path) as store:
        assert all(map(store.get, store.keys()))
        assert len(files_in(tmp_path)) == store.stats.disk_entries == len(rows_in(tmp_path))


def test_an_entry_deleted_between_looking_it_up_and_reading_it_is_a_miss_without_damage(tmp_path):
    with ChunkStore(tmp_path, ram_bytes=0) as store:
        row = store._disk.manifest.row(put(store, 1, make_entry(1)))
        run(child_delete, tmp_path, 1)
        assert store._disk.read(row, pin=False) is None
        run(child_put, tmp_path, 1)
        assert same(store._disk.read(row, pin=False), make_entry(1))
        assert store.stats.damaged == 0


def test_opening_leaves_another_processs_unfinished_file_alone(tmp_path, monkeypatch):
    def write_and_be_interrupted(*args):
        written = write_entry(*args)
        run(child_put, tmp_path, 2)
        return written

    with ChunkStore(tmp_path) as store:
        monkeypatch.setattr(disk, "write_entry", write_and_be_interrupted)
        key = put(store, 1, make_entry(1))
        assert same(store.get(key), make_entry(1))
        assert make_key(2) in store


# Between two of these calls nothing on the disk changes.
CALLS = {"mkdir", "flock", "writev", "fsync", "replace", "unlink", "execute", "executemany"}


def child_die_before_every_call(template, root, action):
    """Forks processes that do the same; the n-th kills itself before its n-th call, until one has no calls left."""
    for calls in itertools.count():
        path = root / str(calls)
        shutil.copytree(template, path)
        pid = os.fork()
        if pid == 0:
            die_before(calls, path, action)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != -signal.SIGKILL:
            return


def die_before(calls, path, action):
    left = calls

    def watch(_, event, function):
        nonlocal left
        if event == "c_call" and function.__name__ in CALLS:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    store = ChunkStore(path, disk_bytes=make_entry(1).nbytes * 3 // 2 if action == "displace" else None)
    sys.setprofile(watch)
    if action == "delete":
        store.delete(make_key(1))
    elif action == "together":
        store.put_all([NewEntry(make_key(number), make_entry(number), "model", "default") for number in (2, 3)])
    else:
        put(store, 2, make_entry(2))
    os._exit(0)


@pytest.mark.parametrize(("action", "outcomes"), [
    ("put", {(1,), (1, 2)}), ("delete", {(1,), ()}), ("displace", {(1,), (), (2,)}),
    ("together", {(1,), (1, 2, 3)}),
])
def test_a_process_killed_at_any_moment_leaves_an_entry_whole_or_not_at_all(tmp_path, action, outcomes):
    template, root = tmp_path / "template", tmp_path / "killed"
    with ChunkStore(template) as store:
        put(store, 1, make_entry(1))
    run(child_die_before_every_call, template, root, action)
    seen = []
    for path in root.iterdir():
        with ChunkStore(path) as store:
            served = tuple(number for number in (1, 2, 3) if same(store.get(make_key(number)), make_entry(number)))
            assert len(store.keys()) == len(files_in(path)) == len(served)
            assert store.stats.damaged == 0
            seen.append(served)
            if action != "delete":
                assert same(store.get(put(store, 2, make_entry(2))), make_entry(2))
    assert set(seen) == outcomes
    assert len(seen) > (4 if action == "delete" else 10)


def child_use_after_fork(path):
    store = open_store(path)
    key = put(store, 1, make_entry(1))
    pid = os.fork()
    if pid == 0:
        with pytest.raises(StoreError, match="open it again after a fork"):
            store.get(key)
        with open_store(path) as own:
            assert own is not store
            assert same(own.get(key), make_entry(1))
            put(own, 2, make_entry(2))
        store.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert make_key(2) in store
    put(store, 3, make_entry(3))
    store.close()


def test_a_forked_process_opens_the_store_for_itself(tmp_path):
    run(child_use_after_fork, tmp_path)
    with ChunkStore(tmp_path) as store:
        assert set(store.keys()) == {make_key(1), make_key(2), make_key(3)}


def test_damage_that_another_process_repaired_is_not_dropped(tmp_path):
    with ChunkStore(tmp_path, ram_bytes=0) as store:
        row = store._disk.manifest.row(put(store, 1, make_entry(1)))
        flip(tmp_path / row.file)
        run(child_repair, tmp_path)
        assert same(store._disk.read(row, pin=False), make_entry(1))
        assert store.stats.damaged == 0


def child_repair(path):
    with ChunkStore(path) as store:
        assert store.get(make_key(1)) is None
        put(store, 1, make_entry(1))
