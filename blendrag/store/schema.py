"""The manifest's tables, and how those of an older blendrag become today's."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from blendrag.errors import StoreError

SCHEMA = 2

REMEMBERED = 10_000
"""So many removals are remembered for those who keep an index; who missed more builds it anew."""

_APPLICATION = 0x626C726B

_ENTRIES = """
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
) WITHOUT ROWID;
CREATE INDEX entries_by_owner ON entries (namespace, fingerprint);
"""

_FINDABLE_BY_OWNER = "CREATE INDEX IF NOT EXISTS findable_by_owner ON findable (namespace, fingerprint, number)"
"""Every new cache salt asks what its scope holds."""

# Token ids are apart from the rest, which is read often and is a fifth of their size.  The numbers only ever
# grow, so that a reader needs to ask for nothing but what is new, whoever wrote it.
_FINDABLE = f"""
CREATE TABLE findable (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    key TEXT NOT NULL UNIQUE,
    fingerprint TEXT NOT NULL,
    namespace TEXT NOT NULL,
    prefix BLOB NOT NULL,
    ids BLOB NOT NULL
);
CREATE TABLE removed (number INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL);
CREATE TABLE totals (entries INTEGER NOT NULL, bytes INTEGER NOT NULL);
INSERT INTO totals SELECT count(*), coalesce(sum(bytes), 0) FROM entries;
CREATE INDEX entries_by_use ON entries (last_used);
CREATE TRIGGER entry_added AFTER INSERT ON entries BEGIN
    UPDATE totals SET entries = entries + 1, bytes = bytes + new.bytes;
END;
CREATE TRIGGER entry_removed AFTER DELETE ON entries BEGIN
    UPDATE totals SET entries = entries - 1, bytes = bytes - old.bytes;
    DELETE FROM findable WHERE key = old.key;
END;
CREATE TRIGGER findable_removed AFTER DELETE ON findable BEGIN
    INSERT INTO removed (key) VALUES (old.key);
    DELETE FROM removed WHERE number <= (SELECT max(number) FROM removed) - {REMEMBERED};
END;
"""


def prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Makes the tables where there are none, and brings old ones up to date, in one transaction.

    Raises:
        StoreError: the database at `path` is of a newer blendrag, or of something else.
    """
    application, schema = _identity(connection, path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    if application == _APPLICATION and schema == SCHEMA:
        connection.execute(_FINDABLE_BY_OWNER)
        return
    connection.execute("BEGIN IMMEDIATE")
    if application != _APPLICATION:
        _run(connection, _ENTRIES)
    _run(connection, _FINDABLE)
    connection.execute(_FINDABLE_BY_OWNER)
    connection.execute(f"PRAGMA user_version = {SCHEMA}")
    connection.execute(f"PRAGMA application_id = {_APPLICATION}")
    connection.execute("COMMIT")


def require_tables(connection: sqlite3.Connection, path: Path) -> None:
    """Finds that a manifest that cannot be changed is one of today's.

    Raises:
        StoreError: it is older or newer, or a database of something else.
    """
    if _identity(connection, path) != (_APPLICATION, SCHEMA):
        raise StoreError(f"the store {path.parent} was written by an older blendrag, and cannot be brought up to date "
                         "where it cannot be written to: open it once where it can, or set another store_path")


def _identity(connection: sqlite3.Connection, path: Path) -> tuple[int, int]:
    application, schema = _number(connection, "application_id"), _number(connection, "user_version")
    if application == _APPLICATION and schema > SCHEMA:
        raise StoreError(f"the store {path.parent} was written by a newer blendrag (schema {schema}, this one knows "
                         f"{SCHEMA}): upgrade blendrag, or set another store_path")
    if application != _APPLICATION and connection.execute("SELECT 1 FROM sqlite_master").fetchall():
        raise StoreError(f"{path} is a database of something else: set another store_path")
    return application, schema


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    ((number,),) = connection.execute(f"PRAGMA {pragma}").fetchall()
    return int(number)


ODD = """
    typeof(key) <> 'text' OR length(key) <> 64 OR key GLOB '*[^0-9a-f]*' OR
    typeof(fingerprint) <> 'text' OR fingerprint = '' OR fingerprint GLOB '*[^0-9A-Za-z_-]*' OR
    typeof(namespace) <> 'text' OR typeof(checksum) <> 'text' OR typeof(dtype) <> 'text' OR typeof(shape) <> 'text' OR
    typeof(bytes) <> 'integer' OR bytes <= 0 OR typeof(tokens) <> 'integer' OR tokens <= 0 OR
    typeof(created) NOT IN ('real', 'integer') OR typeof(last_used) NOT IN ('real', 'integer')
"""
"""True of rows of `entries` that no version writes; nothing but damage makes them."""

DAMAGED_ROWS = f"""
SELECT EXISTS (SELECT 1 FROM entries WHERE {ODD}) OR NOT EXISTS (
    SELECT 1 FROM totals WHERE entries IS (SELECT count(*) FROM entries)
    AND bytes IS (SELECT coalesce(sum(bytes), 0) FROM entries))
"""
"""Whether there are such rows, or the totals are not those of the entries."""

RECOUNT = """
UPDATE totals SET entries = (SELECT count(*) FROM entries), bytes = (SELECT coalesce(sum(bytes), 0) FROM entries)
"""


def _run(connection: sqlite3.Connection, script: str) -> None:
    """`executescript` would commit before it begins."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            connection.execute(statement)
            statement = ""
