"""What the disk tier was given is there after a restart, and what is no longer what it was given is never served."""

import logging
import os
import shutil
import sqlite3
from pathlib import Path

import pytest
from blake3 import blake3

from blendrag.store import ChunkStore, disk
from blendrag.store.tensorfile import write_entry
from blendrag.store.writing import Writing
from tests.test_store_entry import make_entry, make_key, put, same

KEY = make_key(1)


@pytest.fixture
def path(tmp_path):
    """A closed store with the entries 1 and 2."""
    with ChunkStore(tmp_path / "store") as store:
        for number in (1, 2):
            put(store, number, make_entry(number))
    return tmp_path / "store"


def file_of(path, number, fingerprint="model"):
    key = make_key(number)
    return path / fingerprint / key[:2] / f"{key}.safetensors"


def files_in(path):
    """Everything but the manifest."""
    return sorted(found for found in path.rglob("*") if found.is_file() and "manifest" not in found.name)


def rows_in(path, columns="*"):
    connection = sqlite3.connect(path / "manifest.sqlite3")
    try:
        return connection.execute(f"SELECT {columns} FROM entries ORDER BY key").fetchall()
    finally:
        connection.close()


def test_entries_outlive_the_store(path):
    with ChunkStore(path) as store:
        assert store.keys() == sorted([make_key(1), make_key(2)])
        assert KEY in store
        assert same(store.get(KEY), make_entry(1))
        assert same(store.get(make_key(2)), make_entry(2))
        stats = store.stats
    assert (stats.disk_entries, stats.disk_bytes) == (2, sum(file.stat().st_size for file in files_in(path)))
    assert (stats.hits_disk, stats.misses, stats.damaged) == (2, 0, 0)


def test_the_manifest_describes_each_entry(path):
    described = rows_in(path, "key, fingerprint, namespace, tokens, dtype, shape")
    assert (KEY, "model", "default", 5, "bfloat16", "[2, 5, 3, 8]") in described
    files = {path / file: (size, checksum) for file, size, checksum in rows_in(path, "file, bytes, checksum")}
    assert files == {file: (file.stat().st_size, blake3(file.read_bytes()).hexdigest()) for file in files_in(path)}


def test_the_manifest_remembers_when_an_entry_was_last_used(path):
    before = dict(rows_in(path, "key, last_used"))
    with ChunkStore(path) as store:
        store.get(KEY)
    after = dict(rows_in(path, "key, last_used"))
    assert after[KEY] > before[KEY]
    assert after[make_key(2)] == before[make_key(2)]


def test_putting_again_keeps_what_is_stored(path):
    before = file_of(path, 1).stat()
    with ChunkStore(path) as store:
        put(store, 1, make_entry(1))
        assert store.stats.disk_entries == 2
    assert file_of(path, 1).stat().st_ino == before.st_ino


def test_of_two_that_write_the_same_key_at_once_the_first_is_kept(path, monkeypatch):
    def be_overtaken(*args):
        monkeypatch.undo()
        put(other, 3, make_entry(3))
        return write_entry(*args)

    with ChunkStore(path, ram_bytes=0) as store, ChunkStore(path) as other:
        monkeypatch.setattr(disk, "write_entry", be_overtaken)
        key = put(store, 3, make_entry(4))
        assert same(store.get(key), make_entry(3))
        assert (store.stats.damaged, len(files_in(path))) == (0, 3)


def test_a_file_is_on_the_disk_before_its_row_is_and_goes_before_it_goes(tmp_path, monkeypatch):
    events = []

    def watch(owner, name):
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **more: events.append(name) or call(*args, **more))

    for owner, name in ((os, "fsync"), (os, "replace"), (os, "unlink"), (Writing, "add"), (Writing, "commit")):
        watch(owner, name)
    with ChunkStore(tmp_path) as store:
        put(store, 1, make_entry(1))  # makes the folders
        events.clear()
        (tmp_path / "model" / make_key(2)[:2]).mkdir()
        put(store, 2, make_entry(2))
        assert events == ["fsync", "replace", "fsync", "add", "commit", "unlink"]  # of the file's first name
        events.clear()
        store.delete(make_key(2))
        assert events == ["unlink", "commit"]


def flip(file):
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def flip_header(file):
    content = bytearray(file.read_bytes())
    content[0] ^= 0x80
    file.write_bytes(content)


def swap(file):
    other = file_of(file.parents[2], 2)
    content = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(content)


def replace_by_folder(file):
    file.unlink()
    file.mkdir()


def replace_by_file(file):
    shutil.rmtree(file.parent)
    file.parent.write_text("")


@pytest.mark.parametrize("damage", [
    flip, flip_header, swap, replace_by_folder, replace_by_file, Path.unlink,
    lambda file: file.write_bytes(b""),
    lambda file: file.write_bytes(file.read_bytes()[:-1]),
    lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    lambda file: file.write_bytes(b"\xff" * file.stat().st_size),
    lambda file: shutil.rmtree(file.parents[1]),
])
def test_a_damaged_file_is_a_miss_and_is_dropped(path, damage, caplog):
    with ChunkStore(path) as store:
        damage(file_of(path, 1))
        with caplog.at_level(logging.WARNING):
            assert [store.get(KEY) for _ in range(3)] == [None] * 3
        assert [KEY in record.getMessage() for record in caplog.records] == [True]
        assert (store.stats.damaged, store.stats.misses) == (1, 3)
        assert KEY not in store
        assert KEY not in {key for (key,) in rows_in(path, "key")}


@pytest.mark.parametrize("damage", [flip, Path.unlink])
def test_a_damaged_entry_can_be_stored_again(path, damage):
    with ChunkStore(path) as store:
        damage(file_of(path, 1))
        assert store.get(KEY) is None
        put(store, 1, make_entry(1))
    with ChunkStore(path) as store:
        assert same(store.get(KEY), make_entry(1))


def test_a_file_whose_content_belongs_to_another_row_is_not_served(path):
    """The checksum of the file is right, but another entry's."""
    with ChunkStore(path) as store:
        swap(file_of(path, 1))
        assert store.get(KEY) is None
        assert store.get(make_key(2)) is None
        assert store.stats.damaged == 2


def test_opening_removes_files_without_rows_and_rows_without_files(path):
    orphan, lost, half = file_of(path, 3), file_of(path, 2), path / "model" / KEY[:2] / f".{KEY}.0123abcd.tmp"
    orphan.parent.mkdir(exist_ok=True)
    orphan.write_bytes(file_of(path, 1).read_bytes())
    half.write_bytes(b"half")
    lost.unlink()
    with ChunkStore(path) as store:
        assert store.keys() == [KEY]
        assert make_key(3) not in store
        assert (store.get(make_key(3)), store.get(make_key(2))) == (None, None)
        assert store.stats.damaged == 0
    assert files_in(path) == [file_of(path, 1)]


def test_a_file_copied_into_another_models_folder_is_not_served(path):
    copy = file_of(path, 1, "other")
    copy.parent.mkdir(parents=True)
    shutil.copy(file_of(path, 1), copy)
    with ChunkStore(path) as store:
        assert same(store.get(KEY), make_entry(1))
    assert not copy.exists()


def test_files_of_others_are_left_alone(path):
    name = f"{KEY}.safetensors"
    foreign = [path / "notes.txt", path / "model" / "model.safetensors", path / "model" / KEY[:2] / "x.safetensors",
               path / "my documents" / KEY[:2] / name, path / "photos" / "abcd" / name]
    for file in foreign:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
    with ChunkStore(path) as store:
        assert store.clear() == 2
    assert files_in(path) == sorted(foreign)


def test_deleting_and_clearing_remove_the_files(path):
    with ChunkStore(path) as store:
        assert store.delete(KEY)
        assert files_in(path) == [file_of(path, 2)]
        assert store.clear(namespace="default") == 1
        assert files_in(path) == []
        assert store.stats.disk_bytes == 0


def test_the_path_may_be_text_and_is_made_with_its_parents(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with ChunkStore("~/a/b") as store:
        put(store, 1, make_entry(1))
    assert files_in(tmp_path / "a" / "b") == [file_of(tmp_path / "a" / "b", 1)]
