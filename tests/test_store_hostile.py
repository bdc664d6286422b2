"""Whatever has a file's place in the store's folder costs that entry: nothing hangs, and no other file is touched."""

import logging
import os
import sqlite3
import stat
import tempfile
from pathlib import Path

import pytest

from blendrag.errors import StoreError
from blendrag.store import ChunkStore
from tests.hostile import PUT
from tests.test_store_disk import KEY, file_of, files_in, rows_in
from tests.test_store_entry import find, make_entry, make_ids, make_key, put, put_findable, same
from tests.test_store_processes import run


@pytest.fixture
def path(tmp_path):
    """A closed store with the entries 1 and 2."""
    with ChunkStore(tmp_path / "store") as store:
        for number in (1, 2):
            put(store, number, make_entry(number))
    return tmp_path / "store"


def change(path, statement, *values):
    connection = sqlite3.connect(path / "manifest.sqlite3")
    with connection:
        connection.execute(statement, values)
    connection.close()


@pytest.mark.parametrize("kind", PUT)
def test_something_else_in_an_entrys_place_costs_that_entry_and_one_line(path, kind, caplog):
    with ChunkStore(path, ram_bytes=0) as store:
        file_of(path, 1).unlink()
        PUT[kind](file_of(path, 1))
        with caplog.at_level(logging.WARNING):
            assert [store.get(KEY) for _ in range(3)] == [None] * 3
        assert len(caplog.records) == 1
        assert KEY not in store
        assert same(store.get(make_key(2)), make_entry(2))
        assert same(store.get(put(store, 1, make_entry(1))), make_entry(1)), "its place is free again"


@pytest.mark.parametrize("kind", PUT)
def test_a_store_opens_with_anything_in_the_place_of_an_entry_or_of_an_unfinished_file(path, kind):
    file_of(path, 1).unlink()
    PUT[kind](file_of(path, 1))
    PUT[kind](file_of(path, 1).with_name(f".{KEY}.0123abcd.tmp"))
    orphan = file_of(path, 3)
    orphan.parent.mkdir(exist_ok=True)
    PUT[kind](orphan)
    with ChunkStore(path, ram_bytes=0) as store:
        assert store.get(KEY) is None
        assert same(store.get(make_key(2)), make_entry(2))
        for number in (1, 3):
            assert same(store.get(put(store, number, make_entry(number))), make_entry(number))


@pytest.mark.parametrize("kind", [kind for kind in PUT if "empty" not in kind])
@pytest.mark.parametrize("level", [0, 1])
def test_something_else_in_the_place_of_an_entrys_folder_is_no_way_out_of_the_store(path, kind, level):
    folder = file_of(path, 1).parents[level]
    aside = path.parent / "aside"
    folder.rename(aside)
    before = files_in(aside)
    if kind == "link to a file":
        folder.symlink_to(aside)  # the entry itself is at the end of the link
    else:
        PUT[kind](folder)
    with ChunkStore(path, ram_bytes=0) as store:
        assert store.get(KEY) is None
        assert KEY not in store
        store.clear()
    assert files_in(aside) == before


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-journal"])
@pytest.mark.parametrize("kind", [kind for kind in PUT if kind.split()[-1] != "file" or "link" in kind])
def test_something_else_in_the_manifests_place_is_refused_by_name(path, kind, suffix):
    file = path / f"manifest.sqlite3{suffix}"
    file.unlink(missing_ok=True)
    PUT[kind](file)
    with pytest.raises(StoreError, match=f"manifest.sqlite3{suffix} is not a regular file: remove it, or set another"):
        ChunkStore(path)


@pytest.mark.parametrize("place", ["../outside.txt", "/outside.txt"])
def test_a_path_in_the_manifest_leads_nowhere(path, place):
    outside = path.parent / "outside.txt"
    outside.write_text("mine")
    change(path, "UPDATE entries SET file = ? WHERE key = ?", place.replace("/outside", str(outside)[:-4]), KEY)
    with ChunkStore(path, ram_bytes=0) as store:
        assert same(store.get(KEY), make_entry(1)), "the file's place follows from the key"
        assert store.clear() == 2
    assert outside.read_text() == "mine"
    assert files_in(path) == []


@pytest.mark.parametrize(("column", "value"), [
    ("key", "../../outside"), ("fingerprint", "../.."), ("fingerprint", "/"), ("bytes", "many"), ("bytes", 2**62),
    ("bytes", -1), ("tokens", "x"), ("tokens", 6), ("checksum", 5.5), ("dtype", "bool"), ("dtype", b"\xff"),
    ("shape", "[1"), ("shape", "[2, 5, 3]"), ("shape", "[2, 5, 3, -8]"), ("shape", "[" * 10000), ("shape", "5"),
    ("namespace", b"\xff\xfe"), ("namespace", "another"), ("last_used", "long ago"),
])
@pytest.mark.parametrize("opened", [False, True])
def test_a_row_that_no_version_writes_costs_its_entry(path, column, value, opened):
    with ChunkStore(path, ram_bytes=0) as store:
        if opened:
            change(path, f"UPDATE entries SET {column} = ? WHERE key = ?", value, KEY)
            served = store.get(KEY)
            assert served is None or (column == "last_used" and same(served, make_entry(1)))
    change(path, f"UPDATE entries SET {column} = ? WHERE key = ?", value, KEY)
    with ChunkStore(path, ram_bytes=0) as store:
        assert store.get(KEY) is None
        assert same(store.get(make_key(2)), make_entry(2))
        assert store.stats.disk_entries == 1
        put(store, 3, make_entry(3))


def test_rows_that_were_exchanged_serve_nothing(path):
    """Size, checksum, dtype and shape are those of a file that is there; its metadata names another key."""
    described = "bytes, tokens, checksum, dtype, shape"
    (one, two), other = [key for (key,) in rows_in(path, "key")], path / "copy"
    other.mkdir()
    rows = {key: values for key, *values in rows_in(path, f"key, {described}")}
    file_of(path, 1).rename(other / "file")
    file_of(path, 2).rename(file_of(path, 1))
    (other / "file").rename(file_of(path, 2))
    for key, values in ((one, rows[two]), (two, rows[one])):
        change(path, f"UPDATE entries SET ({described}) = (?, ?, ?, ?, ?) WHERE key = ?", *values, key)
    with ChunkStore(path) as store:
        assert [store.get(make_key(number)) for number in (1, 2)] == [None, None]
        assert store.stats.damaged == 2


def test_findable_rows_that_were_exchanged_find_nothing(tmp_path):
    with ChunkStore(tmp_path) as store:
        one, two = put_findable(store, 1), put_findable(store, 2)
    ids = dict(rows_in_findable(tmp_path))
    change(tmp_path, "UPDATE findable SET ids = ? WHERE key = ?", ids[two], one)
    change(tmp_path, "UPDATE findable SET prefix = 'x' WHERE key = ?", two)
    with ChunkStore(tmp_path) as store:
        assert find(store, 1, 2) == []
        assert find(store, 3) == []
        key = put_findable(store, 3)
        assert find(store, 1, 2, 3) == [key]
        assert store.find(make_ids(3), fingerprint="model", namespace="default")[0].tokens == len(make_ids(3))


def rows_in_findable(path):
    connection = sqlite3.connect(path / "manifest.sqlite3")
    found = connection.execute("SELECT key, ids FROM findable").fetchall()
    connection.close()
    return found


@pytest.mark.parametrize(("statement", "harmless"), [
    ("DROP TABLE entries", False), ("DROP TABLE totals", False), ("DROP TABLE findable", False),
    ("ALTER TABLE entries RENAME COLUMN shape TO form", False), ("DELETE FROM totals", False),
    ("DELETE FROM sqlite_sequence", True), ("UPDATE totals SET bytes = 'x'", True),
])
def test_tables_of_another_form_are_an_error_with_a_remedy_or_no_matter(path, statement, harmless):
    change(path, statement)
    if harmless:
        with ChunkStore(path, ram_bytes=0) as store:
            put_findable(store, 3)
            assert find(store, 3)
            assert store.stats.disk_entries == 3
            assert same(store.get(KEY), make_entry(1))
    else:
        with pytest.raises(StoreError, match="has a damaged manifest: delete the folder, or set another store_path"):
            use(path)


def use(path):
    with ChunkStore(path, ram_bytes=0) as store:
        put_findable(store, 3)
        find(store, 3)
        store.get(KEY)
        return store.stats


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_bytes(b"")])
def test_entries_that_lost_their_manifest_are_counted_in_a_warning(path, damage, caplog):
    damage(path / "manifest.sqlite3")
    (path / "model" / "notes.txt").write_text("mine")
    with caplog.at_level(logging.WARNING), ChunkStore(path) as store:
        assert store.keys() == []
    assert "has no manifest, or an empty one: 2 entries of before were removed" in caplog.text
    assert files_in(path) == [path / "model" / "notes.txt"]


@pytest.mark.parametrize("half", ["\ud800", "a\udfffb"])
def test_half_a_surrogate_pair_is_no_namespace(tmp_path, half):
    with ChunkStore(tmp_path) as store:
        for use in (lambda: put(store, 1, make_entry(1), namespace=half), lambda: store.clear(namespace=half),
                    lambda: store.find([1], fingerprint="model", namespace=half)):
            with pytest.raises(StoreError, match="holds half a surrogate pair: name another"):
                use()


# Permissions.

def modes(path):
    """The permissions of all that is below a folder, by kind."""
    found = {stat.S_IMODE(item.stat().st_mode) for item in path.rglob("*") if item.is_file()}
    folders = {stat.S_IMODE(item.stat().st_mode) for item in path.rglob("*") if item.is_dir()}
    return found, folders


def test_only_the_owner_reads_what_is_stored(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    mine.chmod(0o755)
    for path in (mine, tmp_path / "made"):
        with ChunkStore(path) as store:
            put(store, 1, make_entry(1))
            assert modes(path) == ({0o600}, {0o700})
    assert stat.S_IMODE(mine.stat().st_mode) == 0o755, "a folder that was there keeps its permissions"
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o700


def as_nobody():
    if os.geteuid() == 0:
        os.setuid(65534)  # root may write anywhere


def child_read(path):
    as_nobody()
    records = []
    log = logging.getLogger("blendrag.store.disk")
    log.addHandler(handler := logging.Handler())
    handler.emit = records.append
    with ChunkStore(path, ram_bytes=2**20) as store:
        assert store.read_only
        assert sorted(store.keys()) == sorted([make_key(1), make_key(2), put_findable(store, 5)])
        assert find(store, 5)
        for _ in range(2):
            assert same(store.get(make_key(1)), make_entry(1))
        assert (store.stats.hits_disk, store.stats.hits_ram) == (1, 1)
        assert [store.get(make_key(2)) for _ in range(3)] == [None] * 3, "it is damaged"
        for use in (lambda: put(store, 3, make_entry(3)), lambda: store.delete(make_key(1)), store.clear):
            with pytest.raises(StoreError, match="cannot be written to: change its permissions, or set another"):
                use()
    assert len([record for record in records if "opened read-only" in record.getMessage()]) == 1
    assert len([record for record in records if make_key(2) in record.getMessage()]) == 1


@pytest.mark.parametrize("busy", [False, True])
def test_a_store_that_cannot_be_written_to_serves_what_it_has(busy):
    """As in a layer of a container image.  `busy`: another process has it open, and keeps a log."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "store")
        with ChunkStore(path) as store:
            for number in (1, 2):
                put(store, number, make_entry(number))
            put_findable(store, 5)
            content = bytearray(file_of(path, 2).read_bytes())
            content[-5] ^= 1
            file_of(path, 2).write_bytes(content)
            if busy:
                open_up(Path(folder), 0o555, 0o444)
                run(child_read, path)
                open_up(Path(folder), 0o755, 0o644)
        if not busy:
            open_up(Path(folder), 0o555, 0o444)
            run(child_read, path)
            open_up(Path(folder), 0o755, 0o644)


def open_up(folder, of_folders, of_files):
    for item in (folder, *folder.rglob("*")):
        item.chmod(of_folders if item.is_dir() else of_files)
