"""Which document each stored chunk came from: a chunk's KV may go when the last document that holds it goes."""

from __future__ import annotations

import sqlite3
import threading
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from blendrag.errors import StoreError

FILE_NAME = "llama_index_documents.sqlite"

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS chunks (scope TEXT, collection TEXT, document TEXT, version TEXT, chunk TEXT, "
    "PRIMARY KEY (scope, collection, document, version, chunk)) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS by_chunk ON chunks (scope, chunk)",
    "CREATE TABLE IF NOT EXISTS life (name TEXT, forgotten INTEGER)",
)


class Ledger:
    """Chunks by document, in a file that threads and processes may share, or in memory.

    Args:
        folder: of the chunk store, next to whose entries the file stands; None for memory.
        scope: separates the models and namespaces whose entries are in one folder.

    Raises:
        StoreError: the file cannot be opened, read or written.
    """

    def __init__(self, folder: Path | None, scope: str) -> None:
        self._where = "memory" if folder is None else str(folder / FILE_NAME)
        self._scope = scope
        self._lock = threading.Lock()
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(":memory:" if folder is None else self._where, timeout=60,
                                         check_same_thread=False)
        except (sqlite3.Error, OSError) as error:
            raise self._explained(error) from error
        with self._transaction() as file:
            for statement in _SCHEMA:
                file.execute(statement)
            file.execute("INSERT INTO life SELECT ?, 0 WHERE NOT EXISTS (SELECT 1 FROM life)", (uuid.uuid4().hex,))

    @property
    def state(self) -> str:
        """Changes when something was forgotten, and with every new ledger."""
        with self._transaction() as file:
            name, forgotten = file.execute("SELECT name, forgotten FROM life").fetchone()
        return f"{name}/{forgotten}"

    def documents(self, collection: str) -> set[str]:
        """The ids of a collection's documents."""
        with self._transaction() as file:
            return {document for (document,) in file.execute(
                "SELECT DISTINCT document FROM chunks WHERE scope = ? AND collection = ?", (self._scope, collection))}

    def add(self, collection: str, versions: Mapping[str, str], chunks: Mapping[str, Collection[str]]) -> list[str]:
        """Notes the chunks of documents, besides those that are known of the same version.

        Args:
            versions: what tells a document from what it was before, its hash for instance, by the document's id.
            chunks: of each document, by its id.

        Returns:
            chunks that stood in earlier versions of these documents, and stand in no document any more.
        """
        with self._transaction() as file:
            file.executemany("INSERT OR IGNORE INTO chunks VALUES (?, ?, ?, ?, ?)", [
                (self._scope, collection, document, versions[document], chunk)
                for document, found in chunks.items() for chunk in found])
            return self._drop(file, "document = ? AND version <> ?", collection, versions.items())

    def remove(self, collection: str, documents: Iterable[str]) -> list[str]:
        """Strikes documents out; returns the chunks that stand in no document any more."""
        with self._transaction() as file:
            return self._drop(file, "document = ?", collection, [(document,) for document in documents])

    def _drop(self, file: sqlite3.Connection, condition: str, collection: str,
              values: Iterable[tuple[str, ...]]) -> list[str]:
        gone: dict[str, None] = {}
        for given in values:
            which = f"FROM chunks WHERE scope = ? AND collection = ? AND {condition}", (self._scope, collection, *given)
            gone |= dict.fromkeys(chunk for (chunk,) in file.execute(f"SELECT chunk {which[0]}", which[1]))
            file.execute(f"DELETE {which[0]}", which[1])
        orphans = [chunk for chunk in gone if file.execute(
            "SELECT 1 FROM chunks WHERE scope = ? AND chunk = ? LIMIT 1", (self._scope, chunk)).fetchone() is None]
        if orphans:
            file.execute("UPDATE life SET forgotten = forgotten + 1")
        return orphans

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._lock, self._file:
                yield self._file
        except sqlite3.Error as error:
            raise self._explained(error) from error

    def _explained(self, error: Exception) -> StoreError:
        return StoreError(f"the list of documents in {self._where} cannot be used ({error}): make the folder writable, "
                          "or choose another store_path")
