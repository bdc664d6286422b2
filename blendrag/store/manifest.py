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
from pathlib import Path
from typing import Any

from blendrag.errors import StoreError
from blendrag.store.database import connect, connect_read_only, make_file, require_regular_files
from blendrag.store.files import place_of
from blendrag.store.problems import damaged, explained, unwritable
from blendrag.store.ram import Owner
from blendrag.store.rows import ROW, News, Row, is_key, is_named
from blendrag.store.schema import DAMAGED_ROWS, REMEMBERED, prepare, require_tables
from blendrag.store.writing import Writing

FILE = "manifest.sqlite3"

_BUSY_S = 30.0
_PAGE = 5000


class Manifest:
    """The rows of the store in `folder`, which must exist.

    Args:
        read_only: nothing is written, not even a lock.

    Attributes:
        new: whether there was no manifest, or an empty file.

    Raises:
        StoreError: the file is no manifest, a newer blendrag wrote it, or it cannot be used.
    """

    def __init__(self, folder: Path, read_only: bool = False) -> None:
        self.folder = folder
        self.read_only = read_only
        self.new = False
        self._path = folder / FILE
        self._touched: dict[str, float] = {}
        self._touching = threading.Lock()
        self._write_lock, self._read_lock = threading.Lock(), threading.Lock()
        self._writer: sqlite3.Connection | None = None
        self._open: bool = True
        require_regular_files(self._path)
        with explained(folder), self._undamaged():
            if read_only:
                self._reader = connect_read_only(self._path, _BUSY_S)
                check = require_tables
            else:
                self.new = make_file(self._path)
                # A connection of its own for reads: they need not wait while a commit reaches the disk.
                self._writer, self._reader = connect(self._path, _BUSY_S), connect(self._path, _BUSY_S)
                check = prepare
            try:
                check(self._writer or self._reader, self._path)
                self._reader.execute("PRAGMA query_only = TRUE")
                self._inode = self._path.stat().st_ino
            except BaseException:
                self.close()
                raise
        _living.add(self)

    def row(self, key: str) -> Row | None:
        """What the manifest says about an entry."""
        found = self._read(ROW, key)
        return Row.of(found[0]) if found else None

    def present(self, keys: Iterable[str]) -> set[str]:
        """Those of `keys` that are entries."""
        wanted = json.dumps(list(keys))
        found = self._read("SELECT key FROM entries WHERE key IN (SELECT value FROM json_each(?))", wanted)
        return {key for (key,) in found}

    def files(self) -> dict[str, str]:
        """The file of each entry, by key."""
        rows = self._read("SELECT key, fingerprint FROM entries")
        # A damaged table may show rows to one query that it hides from another.
        return {key: place_of(fingerprint, key) for key, fingerprint in rows if is_named(key, fingerprint)}

    def keys(self) -> list[str]:
        """All keys, in order."""
        return [key for (key,) in self._read("SELECT key FROM entries ORDER BY key") if is_key(key)]

    def has_damaged_rows(self) -> bool:
        """Whether there are rows that no version writes, or totals that are not those of the entries."""
        ((damaged,),) = self._read(DAMAGED_ROWS)
        return bool(damaged)

    def totals(self) -> tuple[int, int]:
        """Number of entries, and the size of their files in bytes."""
        with self._undamaged():
            ((count, size),) = self._read("SELECT entries, bytes FROM totals")
            return int(count), int(size)

    def version(self) -> int:
        """A number that another commit, of any process, changes."""
        ((version,),) = self._read("PRAGMA data_version")
        return int(version)

    def news(self, of: Owner, added: int, removed: int) -> News:
        """The next findable entries of an owner, a few thousand at once, and all removals until now.

        Args:
            added, removed: the numbers that the last news ended with; 0 for everything.
        """
        with self._read_lock, explained(self.folder), self._undamaged():
            self._require_open()
            reader = self._reader
            reader.execute("BEGIN")  # one moment of the manifest for all that follows
            try:
                ends = dict(reader.execute("SELECT name, seq FROM sqlite_sequence"))
                last_added, last_removed = ends.get("findable", 0), ends.get("removed", 0)
                if last_removed - removed > REMEMBERED and added:
                    return News([], [], 0, last_removed, more=True, lost=True)
                rows = reader.execute("SELECT number, key, prefix, ids FROM findable WHERE number > ? AND"
                                      " fingerprint = ? AND namespace = ? ORDER BY number LIMIT ?",
                                      (added, of.fingerprint, of.namespace, _PAGE)).fetchall()
                gone = []
                if added:  # whoever has seen nothing yet has nothing to forget
                    gone = reader.execute("SELECT key FROM removed WHERE number > ?", (removed,)).fetchall()
                more = len(rows) == _PAGE
                return News([row[1:] for row in rows], [key for (key,) in gone], rows[-1][0] if more else last_added,
                            last_removed, more)
            finally:
                reader.execute("ROLLBACK")

    def touch(self, key: str) -> None:
        """Notes that an entry was used."""
        if self.read_only:
            return
        with self._touching:
            self._touched[key] = time.time()

    @contextmanager
    def writing(self) -> Iterator[Writing]:
        """The right to change the manifest, which one thread of one process has at a time.

        What is not committed at the end is undone.

        Raises:
            StoreError: also where the store cannot be written to.
        """
        if self._writer is None:
            raise unwritable(self.folder)
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
            if self._writer is not None:
                self._writer.close()

    @contextmanager
    def _undamaged(self) -> Iterator[None]:
        """Values of another type than the tables' are damage."""
        try:
            yield
        except (TypeError, ValueError, OverflowError) as error:
            raise damaged(self.folder) from error

    def _read(self, query: str, *values: str) -> list[tuple[Any, ...]]:
        with self._read_lock, explained(self.folder):
            self._require_open()
            return self._reader.execute(query, values).fetchall()

    def _require_open(self) -> None:
        if not self._open:
            raise StoreError("the chunk store is closed: open it again")


_living: weakref.WeakSet[Manifest] = weakref.WeakSet()
_inherited: list[Manifest] = []

# SQLite forbids a forked child even to close its parent's connections: keep them from the garbage collector.
os.register_at_fork(after_in_child=lambda: _inherited.extend(_living))
