"""The disk tier: one safetensors file per entry, and a manifest that says which files count.

An entry exists when its row does.  Its file is complete and on the disk before the row is written, under
the manifest's write lock; so a crash at any moment leaves at most a file without a row, which is never
served, and which the next opening removes.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from blendrag.errors import StoreError
from blendrag.store.entry import KVEntry, dtype_name
from blendrag.store.files import alone_in, folder_of, remove_if_abandoned, scan, sync_folder, unfinished
from blendrag.store.manifest import Manifest
from blendrag.store.problems import explained, make_folder
from blendrag.store.ram import Owner
from blendrag.store.rows import Row, Tokens
from blendrag.store.tensorfile import read_entry, write_entry
from blendrag.store.writing import Writing

_log = logging.getLogger(__name__)

_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO}


class DiskTier:
    """The entries in a folder, which is made if it is not there.  Threads and processes may share it.

    Args:
        budget: bytes that the files of all entries may have, from whatever process; None for no limit.

    Raises:
        StoreError: the folder cannot be used; the message names the remedy.
    """

    def __init__(self, path: Path, budget: int | None = None) -> None:
        self.path = path
        self.budget = budget
        self.damaged = self.evicted = 0
        self._counting = threading.Lock()
        make_folder(path)
        with explained(path), alone_in(path):
            self.manifest = Manifest(path)
            try:
                self._tidy()
                sync_folder(path)
                with suppress(PermissionError):
                    sync_folder(path.parent)
            except BaseException:
                self.manifest.close()
                raise

    def put(self, key: str, entry: KVEntry, owner: Owner, tokens: Tokens | None = None) -> list[str] | None:
        """Writes an entry in host memory.  A key that is there keeps what it has: the same key means the same KV.

        Returns:
            keys of the entries that left to make room; None where this one is larger than the whole budget
            and is not kept.
        """
        if self.manifest.row(key):
            return []
        fingerprint, namespace = str(owner.fingerprint), str(owner.namespace)
        about = {"key": key, "fingerprint": fingerprint, "namespace": namespace}
        if self.budget is not None and entry.nbytes > self.budget:
            return None
        with explained(self.path), unfinished(folder_of(self.path, fingerprint, key), key) as (file, name):
            size, checksum = write_entry(file, entry, about)
            if self.budget is not None and size > self.budget:
                return None
            os.fsync(file.fileno())
            final = name.with_name(f"{key}.safetensors")
            now = time.time()
            row = Row(key, fingerprint, namespace, str(final.relative_to(self.path)), size, entry.tokens, checksum,
                      dtype_name(entry.k.dtype), json.dumps(list(entry.k.shape)), now, now)
            with self.manifest.writing() as writing:
                if writing.row(key):
                    return []
                self.manifest.flush(writing)
                leaving = self._make_room(writing, size)
                self._publish(writing, name, final, row, tokens, leaving)
        with self._counting:
            self.evicted += len(leaving)
        return [old.key for old in leaving]

    def read(self, row: Row, pin: bool) -> KVEntry | None:
        """The entry that `row` describes; None where it is damaged, which removes it, or was just deleted."""
        entry = self._load(row, pin)
        if entry is not None:
            return entry
        # Another process may have deleted or replaced the file since: look again while nobody can.
        try:
            with self.manifest.writing() as writing:
                now = writing.row(row.key)
                if now is None or (entry := self._load(now, pin)) is not None:
                    return entry
                writing.remove([row.key])
                with suppress(OSError):
                    (self.path / now.file).unlink()
                writing.commit()
        except StoreError as error:
            _log.warning("a damaged chunk could not be removed: %s", error)
        with self._counting:
            self.damaged += 1
        _log.warning("%s is damaged or missing: the chunk was dropped, and is computed again", self.path / row.file)
        return None

    def delete(self, key: str) -> bool:
        """Removes an entry; says whether there was one."""
        with self.manifest.writing() as writing:
            row = writing.row(key)
            if row:
                self._remove(writing, [row])
            return row is not None

    def clear(self, of: Owner) -> int:
        """Removes the entries of an owner; returns how many."""
        with self.manifest.writing() as writing:
            rows = writing.rows(of)
            self._remove(writing, rows)
            return len(rows)

    def _make_room(self, writing: Writing, size: int) -> list[Row]:
        """Takes the least recently used entries out of the manifest, until `size` more bytes fit into the budget."""
        if self.budget is None:
            return []
        rows = writing.least_used(writing.total_bytes() + size - self.budget)
        writing.remove(row.key for row in rows)
        return rows

    def _publish(self, writing: Writing, name: Path, final: Path, row: Row, tokens: Tokens | None,
                 leaving: list[Row]) -> None:
        try:
            name.replace(final)
            sync_folder(final.parent)
            writing.add(row, tokens)
            for old in leaving:  # now, as after the commit somebody may store it again
                (self.path / old.file).unlink(missing_ok=True)
            writing.commit()
        except BaseException:
            final.unlink(missing_ok=True)
            raise

    def _remove(self, writing: Writing, rows: list[Row]) -> None:
        writing.remove(row.key for row in rows)
        for row in rows:
            (self.path / row.file).unlink(missing_ok=True)
        writing.commit()

    def _load(self, row: Row, pin: bool) -> KVEntry | None:
        with explained(self.path):
            try:
                return read_entry(self.path / row.file, row.bytes, row.checksum, pin)
            except OSError as error:
                if error.errno in _DAMAGE:
                    return None
                raise

    def _tidy(self) -> None:
        """Removes what crashed processes left: files without a row, rows without a file, unfinished files."""
        entries, unfinished = scan(self.path)
        files = self.manifest.files()
        orphans = entries - set(files.values())
        lost = [key for key, file in files.items() if file not in entries]
        if orphans or lost:
            # Others may be at work: judge again while they cannot be.
            with self.manifest.writing() as writing:
                rows = {file: writing.row(Path(file).stem) for file in orphans}
                orphans = {file for file, row in rows.items() if row is None or row.file != file}
                lost = [key for key in lost if not (self.path / files[key]).exists()]
                writing.remove(lost)
                for file in orphans:
                    (self.path / file).unlink(missing_ok=True)
                writing.commit()
            _log.info("%s: removed %d files and %d rows of interrupted writes", self.path, len(orphans), len(lost))
        for path in unfinished:
            remove_if_abandoned(path)
