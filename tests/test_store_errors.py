"""What goes wrong with a disk is said in one sentence with the remedy, and costs nothing that was stored."""

import os
import resource
import shutil
import sqlite3
import tempfile
from io import FileIO
from pathlib import Path

import pytest

from blendrag import private
from blendrag.errors import StoreError
from blendrag.store import ChunkStore, manifest
from tests.test_store_disk import files_in, flip
from tests.test_store_entry import make_entry, make_key, put, same
from tests.test_store_processes import run

LARGE = (2, 500, 3, 8)


def still_works(store, path):
    """Nothing of the failed entry 2 is left, and entry 1 can be read, removed and written."""
    assert make_key(2) not in store
    assert store.get(make_key(2)) is None
    assert same(store.get(make_key(1)), make_entry(1))
    assert len(files_in(path)) == store.stats.disk_entries == 1
    assert store.stats.damaged == 0


def test_a_full_disk(tmp_path, monkeypatch):
    """/dev/full answers every write as a full disk does."""
    with ChunkStore(tmp_path, ram_bytes=0) as store:
        put(store, 1, make_entry(1))
        with monkeypatch.context() as patch:
            patch.setattr(private, "FileIO", lambda *_: FileIO("/dev/full", "w"))
            with pytest.raises(StoreError, match="has no space left: free some, or set another store_path"):
                put(store, 2, make_entry(2))
        still_works(store, tmp_path)
        assert same(store.get(put(store, 2, make_entry(2))), make_entry(2))


def child_limit_files(path):
    with ChunkStore(path, ram_bytes=0) as store:
        put(store, 1, make_entry(1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
        with pytest.raises(StoreError, match=r"may not hold files this large: raise the limit .*ulimit -f"):
            put(store, 2, make_entry(2, LARGE))
        still_works(store, path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert same(store.get(put(store, 2, make_entry(2, LARGE))), make_entry(2, LARGE))


def test_a_file_that_is_cut_off_while_it_is_written(tmp_path):
    run(child_limit_files, tmp_path)


def child_limit_manifest(path):
    with ChunkStore(path, ram_bytes=0) as store:
        put(store, 1, make_entry(1))
        log = (path / "manifest.sqlite3-wal").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (log, resource.RLIM_INFINITY))
        with pytest.raises(StoreError, match="set another store_path"):
            put(store, 2, make_entry(2))
        still_works(store, path)
        with pytest.raises(StoreError, match="set another store_path"):
            store.delete(make_key(1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert same(store.get(put(store, 2, make_entry(2))), make_entry(2))


def test_a_manifest_that_cannot_grow(tmp_path):
    run(child_limit_manifest, tmp_path)


def child_damage_on_a_full_disk(path):
    with ChunkStore(path, ram_bytes=0) as store:
        flip(path / store._disk.manifest.row(put(store, 1, make_entry(1))).file)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        assert store.get(make_key(1)) is None
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert store.get(make_key(1)) is None
        assert make_key(1) not in store


def test_damage_that_cannot_be_removed_is_a_miss_all_the_same(tmp_path):
    run(child_damage_on_a_full_disk, tmp_path)


def child_read_only(path):
    if os.geteuid() == 0:
        os.setuid(65534)  # root may write anywhere
    with pytest.raises(StoreError, match="cannot be written to: change its permissions, or set another store_path"):
        ChunkStore(path)
    with pytest.raises(StoreError, match="cannot be written to: change its permissions, or set another store_path"):
        ChunkStore(path / "below")


def test_a_read_only_folder():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        path.chmod(0o555)
        run(child_read_only, path)
        path.chmod(0o755)


def test_a_path_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match="is not a folder: set another store_path"):
            ChunkStore(path)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_path_where_no_folder_can_be_made():
    with pytest.raises(StoreError, match="the store /proc/nope cannot be made there: set another store_path"):
        ChunkStore(Path("/proc/nope"))


def test_a_manifest_that_is_no_database(tmp_path):
    (tmp_path / "manifest.sqlite3").write_text("not a database, but long enough to be looked at" * 100)
    with pytest.raises(StoreError, match="that is not a database: delete the folder, or set another"):
        ChunkStore(tmp_path)


def test_a_manifest_that_is_a_folder(tmp_path):
    (tmp_path / "manifest.sqlite3").mkdir()
    with pytest.raises(StoreError, match="is not a regular file: remove it, or set another"):
        ChunkStore(tmp_path)


def test_a_damaged_manifest(tmp_path):
    with ChunkStore(tmp_path) as store:
        put(store, 1, make_entry(1))
    file = tmp_path / "manifest.sqlite3"
    content = bytearray(file.read_bytes())
    content[4096:] = os.urandom(len(content) - 4096)
    file.write_bytes(content)
    with pytest.raises(StoreError, match="has a damaged manifest: delete the folder, or set another store_path"):
        ChunkStore(tmp_path)


def change(path, statement):
    connection = sqlite3.connect(path / "manifest.sqlite3")
    connection.execute(statement)
    connection.commit()
    connection.close()


def test_a_store_of_a_newer_blendrag(tmp_path):
    with ChunkStore(tmp_path) as store:
        put(store, 1, make_entry(1))
    change(tmp_path, "PRAGMA user_version = 3")
    with pytest.raises(StoreError, match=r"newer blendrag \(schema 3, this one knows 2\): upgrade blendrag"):
        ChunkStore(tmp_path)
    change(tmp_path, "PRAGMA user_version = 2")
    with ChunkStore(tmp_path) as store:
        assert same(store.get(make_key(1)), make_entry(1))


def test_a_database_of_something_else(tmp_path):
    change(tmp_path, "CREATE TABLE entries (mine)")
    with pytest.raises(StoreError, match="is a database of something else: set another store_path"):
        ChunkStore(tmp_path)


def test_a_store_locked_by_another_process(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "_BUSY_S", 0.01)
    with ChunkStore(tmp_path) as store, ChunkStore(tmp_path) as other, other._disk.manifest.writing():
        with pytest.raises(StoreError, match="is locked by another process: wait for it to finish"):
            put(store, 1, make_entry(1))
        assert files_in(tmp_path) == []
        assert make_key(1) not in store


@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_that_vanishes_while_the_store_is_open(tmp_path, replaced):
    path = tmp_path / "store"
    with ChunkStore(path, ram_bytes=0) as store:
        put(store, 1, make_entry(1))
        shutil.rmtree(path)
        if replaced:
            ChunkStore(path).close()
        assert store.get(make_key(1)) is None
        with pytest.raises(StoreError, match="was removed while in use: close the store and open it again"):
            put(store, 2, make_entry(2))
        assert not path.exists() or files_in(path) == []
    with ChunkStore(path) as store:
        assert same(store.get(put(store, 2, make_entry(2))), make_entry(2))
