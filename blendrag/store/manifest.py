"""The manifest of the disk tier: an SQLite table that says which files are entries.

Several threads and processes use one manifest.  Reads see what was committed last and wait for nobody;
writers take turns, also between processes.
"""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from blendrag.errors import StoreError
from blendrag.store.problems import explained
from blendrag.store.ram import Owner

FILE = "manifest.sqlite3"
SCHEMA = 1

_APPLICATION = 0x626C726B
_BUSY_S = 30.0
_TABLE = """
CREATE TABLE entries (
    key TEXT PRIMARY KEY,
    fingerprint TEXT NOT NULL,
    namespace TEXT NOT NULL,
    file TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    checksum TEXT NOT NULL,
    dtype TEXT NOT NULL,
    shape TEXT NOT NULL,
    created REAL NOT NULL,
    last_used REAL NOT NULL
) WITHOUT ROWID
"""


@dataclass(frozen=True)
class Row:
    """One entry: where it is, and how to know it.

    Attributes:
        file: path relative to the store's folder.
        bytes: size of the file.
        checksum: blake3 of the file's bytes, 64 hex digits.
        shape: of keys and of values, as JSON.
        created, last_used: seconds since 1970; `last_used` is brought up to date with the next write.
    """

    key: str
    fingerprint: str
    namespace: str
    file: str
    bytes: int
    tokens: int
    checksum: str
    dtype: str
    shape: str
    created: float
    last_used: float


_COLUMNS = ", ".join(field.name for field in fields(Row))
_ROW = f"SELECT {_COLUMNS} FROM entries WHERE key = ?"


class Manifest:
    """The rows of the store in `folder`, which must exist.

    Raises:
        StoreError: the file is no manifest, a newer blendrag wrote it, or it cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / FILE
        self._touched: dict[str, float] = {}
        self._touching = threading.Lock()
        with explained(folder):
            # A connection of its own for reads: they need not wait while a commit reaches the disk.
            self._writer, self._write_lock = _connect(self._path), threading.Lock()
            self._reader, self._read_lock = _connect(self._path), threading.Lock()
            self._open: bool = True
            try:
                self._prepare()
                self._inode = self._path.stat().st_ino
            except BaseException:
                self.close()
                raise
        _living.add(self)

    def row(self, key: str) -> Row | None:
        """What the manifest says about an entry."""
        found = self._read(_ROW, key)
        return Row(*found[0]) if found else None

    def present(self, keys: Iterable[str]) -> set[str]:
        """Those of `keys` that are entries."""
        wanted = json.dumps(list(keys))
        found = self._read("SELECT key FROM entries WHERE key IN (SELECT value FROM json_each(?))", wanted)
        return {key for (key,) in found}

    def files(self) -> dict[str, str]:
        """The file of each entry, by key."""
        return dict(self._read("SELECT key, file FROM entries"))

    def keys(self) -> list[str]:
        """All keys, in order."""
        return [key for (key,) in self._read("SELECT key FROM entries ORDER BY key")]

    def totals(self) -> tuple[int, int]:
        """Number of entries, and the size of their files in bytes."""
        ((count, size),) = self._read("SELECT count(*), coalesce(sum(bytes), 0) FROM entries")
        return count, size

    def touch(self, key: str) -> None:
        """Notes that an entry was used."""
        with self._touching:
            self._touched[key] = time.time()

    @contextmanager
    def writing(self) -> Iterator[Writing]:
        """The right to change the manifest, which one thread of one process has at a time.

        What is not committed at the end is undone.
        """
        with self._write_lock, explained(self.folder):
            self._require_open()
            if self._path.stat().st_ino != self._inode:
                raise FileNotFoundError(errno.ENOENT, "another manifest is in its place")
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield Writing(self._writer)
            finally:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")

    def flush(self, writing: Writing) -> None:
        """Writes down which entries were used when; the caller commits."""
        with self._touching:
            touched, self._touched = self._touched, {}
        writing.touch(touched)

    def close(self) -> None:
        """Ends the connections; a second call does nothing."""
        if self._open and self._touched:
            with suppress(StoreError), self.writing() as writing:
                self.flush(writing)
                writing.commit()
        with self._write_lock, self._read_lock:
            self._open = False
            self._reader.close()
            self._writer.close()

    def _read(self, query: str, *values: str) -> list[tuple[Any, ...]]:
        with self._read_lock, explained(self.folder):
            self._require_open()
            return self._reader.execute(query, values).fetchall()

    def _require_open(self) -> None:
        if not self._open:
            raise StoreError("the chunk store is closed: open it again")

    def _prepare(self) -> None:
        writer = self._writer
        ((application,),) = writer.execute("PRAGMA application_id").fetchall()
        ((schema,),) = writer.execute("PRAGMA user_version").fetchall()
        if application == _APPLICATION and schema > SCHEMA:
            raise StoreError(f"the store {self.folder} was written by a newer blendrag (schema {schema}, this one "
                             f"knows {SCHEMA}): upgrade blendrag, or set another store_path")
        if application != _APPLICATION and writer.execute("SELECT 1 FROM sqlite_master").fetchall():
            raise StoreError(f"{self._path} is a database of something else: set another store_path")
        for connection in (writer, self._reader):
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
        if application != _APPLICATION:
            writer.execute("BEGIN IMMEDIATE")
            writer.execute(_TABLE)
            writer.execute("CREATE INDEX entries_by_owner ON entries (namespace, fingerprint)")
            writer.execute(f"PRAGMA user_version = {SCHEMA}")
            writer.execute(f"PRAGMA application_id = {_APPLICATION}")
            writer.execute("COMMIT")


class Writing:
    """Changes to a manifest, inside `Manifest.writing`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def row(self, key: str) -> Row | None:
        """What the manifest says about an entry; nobody else can change it now."""
        found = self._connection.execute(_ROW, (key,)).fetchone()
        return Row(*found) if found else None

    def rows(self, of: Owner) -> list[Row]:
        """The entries of an owner."""
        query = (f"SELECT {_COLUMNS} FROM entries WHERE (?1 IS NULL OR fingerprint = ?1)"
                 " AND (?2 IS NULL OR namespace = ?2)")
        return [Row(*found) for found in self._connection.execute(query, (of.fingerprint, of.namespace))]

    def add(self, row: Row) -> None:
        """Adds an entry."""
        marks = ", ".join("?" * len(fields(Row)))
        self._connection.execute(f"INSERT INTO entries ({_COLUMNS}) VALUES ({marks})", astuple(row))

    def remove(self, keys: Iterable[str]) -> None:
        """Removes entries."""
        self._connection.executemany("DELETE FROM entries WHERE key = ?", [(key,) for key in keys])

    def touch(self, used: dict[str, float]) -> None:
        """Sets when entries were last used, in seconds since 1970."""
        changes = [(when, key) for key, when in used.items()]
        self._connection.executemany("UPDATE entries SET last_used = ? WHERE key = ?", changes)

    def commit(self) -> None:
        """Makes the changes last; they are on the disk when this returns."""
        self._connection.execute("COMMIT")


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)


_living: weakref.WeakSet[Manifest] = weakref.WeakSet()
_inherited: list[Manifest] = []

# SQLite forbids a forked child even to close its parent's connections: keep them from the garbage collector.
os.register_at_fork(after_in_child=lambda: _inherited.extend(_living))
