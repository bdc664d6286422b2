"""Changes to the manifest."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import astuple, fields

from blendrag.store.ram import Owner
from blendrag.store.rows import COLUMNS, ROW, Row, Tokens


class Writing:
    """Changes to a manifest, inside `Manifest.writing`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def row(self, key: str) -> Row | None:
        """What the manifest says about an entry; nobody else can change it now."""
        found = self._connection.execute(ROW, (key,)).fetchone()
        return Row(*found) if found else None

    def rows(self, of: Owner) -> list[Row]:
        """The entries of an owner."""
        query = (f"SELECT {COLUMNS} FROM entries WHERE (?1 IS NULL OR fingerprint = ?1)"
                 " AND (?2 IS NULL OR namespace = ?2)")
        return [Row(*found) for found in self._connection.execute(query, (of.fingerprint, of.namespace))]

    def add(self, row: Row, tokens: Tokens | None) -> None:
        """Adds an entry, which is findable by its tokens where they are given."""
        marks = ", ".join("?" * len(fields(Row)))
        self._connection.execute(f"INSERT INTO entries ({COLUMNS}) VALUES ({marks})", astuple(row))
        if tokens:
            self._connection.execute("INSERT INTO findable (key, fingerprint, namespace, prefix, ids)"
                                     " VALUES (?, ?, ?, ?, ?)",
                                     (row.key, row.fingerprint, row.namespace, tokens.prefix, tokens.ids))

    def least_used(self, size: int) -> list[Row]:
        """The least recently used entries, as many as hold `size` bytes."""
        rows: list[Row] = []
        for found in self._connection.execute(f"SELECT {COLUMNS} FROM entries ORDER BY last_used"):
            if size <= 0:
                break
            rows.append(Row(*found))
            size -= rows[-1].bytes
        return rows

    def total_bytes(self) -> int:
        """Size of all entries' files."""
        return int(self._connection.execute("SELECT bytes FROM totals").fetchone()[0])

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
