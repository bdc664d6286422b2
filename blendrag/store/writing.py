"""Changes to the manifest."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import astuple, fields

from blendrag.store.keys import SCOPE_SEPARATOR
from blendrag.store.ram import Owner
from blendrag.store.rows import COLUMNS, ROW, Row, Tokens
from blendrag.store.schema import ODD, RECOUNT

_WITHIN = f"(namespace = ?2 OR namespace BETWEEN ?2 || '{SCOPE_SEPARATOR}' AND ?2 || '{chr(ord(SCOPE_SEPARATOR) + 1)}')"
"""Condition: an entry is of a namespace, or of one of its scopes."""


class Writing:
    """Changes to a manifest, inside `Manifest.writing`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def row(self, key: str) -> Row | None:
        """What the manifest says about an entry; nobody else can change it now."""
        found = self._connection.execute(ROW, (key,)).fetchone()
        return Row.of(found) if found else None

    def rows(self, of: Owner) -> list[Row]:
        """The entries of an owner, those of a namespace's scopes included."""
        query = f"SELECT {COLUMNS} FROM entries WHERE (?1 IS NULL OR fingerprint = ?1) AND (?2 IS NULL OR {_WITHIN})"
        found = map(Row.of, self._connection.execute(query, (of.fingerprint, of.namespace)))
        return [row for row in found if row]

    def add(self, row: Row, tokens: Tokens | None) -> None:
        """Adds an entry, which is findable by its tokens where they are given; replaces what is no row of an entry."""
        self.remove([row.key])
        marks = ", ".join("?" * (len(fields(Row)) + 1))
        # The file's name follows from the rest; the column is there for older versions.
        self._connection.execute(f"INSERT INTO entries ({COLUMNS}, file) VALUES ({marks})", (*astuple(row), row.file))
        if tokens:
            self._connection.execute("INSERT INTO findable (key, fingerprint, namespace, prefix, ids)"
                                     " VALUES (?, ?, ?, ?, ?)",
                                     (row.key, row.fingerprint, row.namespace, tokens.prefix, tokens.ids))

    def least_used(self, size: int, namespace: str | None = None) -> list[Row]:
        """The least recently used entries, of a namespace or of all, as many as hold `size` bytes."""
        rows: list[Row] = []
        query = f"SELECT {COLUMNS} FROM entries WHERE (?2 IS NULL OR {_WITHIN}) ORDER BY last_used"
        for found in self._connection.execute(query, (None, namespace)) if size > 0 else ():
            if size <= 0:
                break
            if row := Row.of(found):
                rows.append(row)
                size -= row.bytes
        return rows

    def total_bytes(self) -> int:
        """Size of all entries' files."""
        return int(self._connection.execute("SELECT CAST(bytes AS INTEGER) FROM totals").fetchone()[0])

    def bytes_of(self, namespace: str) -> int:
        """Size of the files of a namespace's entries."""
        query = f"SELECT coalesce(sum(bytes), 0) FROM entries WHERE {_WITHIN}"
        return int(self._connection.execute(query, (None, namespace)).fetchone()[0])

    def remove(self, keys: Iterable[str]) -> None:
        """Removes entries."""
        self._connection.executemany("DELETE FROM entries WHERE key = ?", [(key,) for key in keys])

    def remove_odd(self) -> int:
        """Removes what no version has written, and counts what is left; returns how many rows went.

        Raises:
            sqlite3.Error: a table is missing, or has another form.
        """
        removed = self._connection.execute(f"DELETE FROM entries WHERE {ODD}").rowcount
        self._connection.execute(RECOUNT)
        return removed

    def touch(self, used: dict[str, float]) -> None:
        """Sets when entries were last used, in seconds since 1970."""
        changes = [(when, key) for key, when in used.items()]
        self._connection.executemany("UPDATE entries SET last_used = ? WHERE key = ?", changes)

    def commit(self) -> None:
        """Makes the changes last; they are on the disk when this returns."""
        self._connection.execute("COMMIT")
