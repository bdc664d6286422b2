"""The disk tier: one safetensors file per entry, and a manifest that says which files count.

An entry exists when its row does.  Its file is complete and on the disk before the row is written, under
the manifest's write lock; so a crash at any moment leaves at most files without rows, which are never
served, and which the next opening removes.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from blendrag.errors import StoreError
from blendrag.store.entry import KVEntry, dtype_name
from blendrag.store.files import alone_in, folder_of, remove, remove_if_abandoned, scan, sync_folder, unfinished, vacate
from blendrag.store.keys import SCOPE_SEPARATOR
from blendrag.store.manifest import FILE, Manifest
from blendrag.store.problems import explained, make_folder, unwritable
from blendrag.store.ram import Owner
from blendrag.store.rows import NewEntry, Row, Tokens
from blendrag.store.tensorfile import metadata_of, read_entry, write_entry
from blendrag.store.writing import Writing

_log = logging.getLogger(__name__)

_OF_THE_PROCESS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Errors that say nothing of the file that was to be opened."""

_REPORTED = 1000
_WRITERS = 4

_read_only: set[Path] = set()
"""Stores of which the log says so already."""


@dataclass(frozen=True)
class _Unfinished:
    """A file that is complete and on the disk, and no entry yet.

    Attributes:
        folder: the open folder that it is in.
        name: what it is called there.
        final: what the entry's file is called.
    """

    row: Row
    tokens: Tokens | None
    folder: int
    name: str
    final: str


class DiskTier:
    """The entries in a folder, which is made if it is not there.  Threads and processes may share it.

    A store that is there and cannot be written to is opened read-only: entries are read, and every write is an error.

    Args:
        budget: bytes that the files of all entries may have, from whatever process; None for no limit.
        quotas: bytes that the files of a namespace's entries may have, its scopes' included.

    Attributes:
        read_only: whether nothing can be written.

    Raises:
        StoreError: the folder cannot be used; the message names the remedy.
    """

    def __init__(self, path: Path, budget: int | None = None, quotas: Mapping[str, int] | None = None) -> None:
        self.path = path
        self.budget = budget
        self.quotas = dict(quotas or {})
        self.damaged = self.evicted = 0
        self._counting = threading.Lock()
        self._reported: set[str] = set()
        make_folder(path)
        self.read_only = not _writable(path)
        if self.read_only:
            self.manifest = Manifest(path, read_only=True)
            if path not in _read_only:
                _read_only.add(path)
                _log.warning("the store %s cannot be written to: it is opened read-only", path)
            return
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

    def put(self, items: Sequence[NewEntry]) -> list[list[str] | None]:
        """Writes entries in host memory; all are on the disk when it returns, and if that fails, none is there.

        Several files are written and brought to the disk at a time, and one commit makes all of them entries.  A key
        that is there keeps what it has: the same key means the same KV.

        Returns:
            of each, the keys of the entries that left to make room; None where it is larger than the whole budget, or
            its namespace's quota, and is not kept.
        """
        new = {item.key: item for item in items if not self.manifest.row(item.key)}
        if new and self.read_only:
            raise unwritable(self.path)
        fitting = [item for item in new.values() if item.entry.nbytes <= self._most(item.namespace)]
        with explained(self.path), ExitStack() as files:
            written = list(self._write_all(fitting, files))
            kept = [file for file in written if file.row.bytes <= self._most(file.row.namespace)]
            left: dict[str, list[str] | None] = dict.fromkeys(new)
            left |= {file.row.key: [] for file in kept}
            if kept:
                with self.manifest.writing() as writing:
                    left |= self._publish(writing, [file for file in kept if not writing.row(file.row.key)])
        with self._counting:
            self.evicted += sum(len(keys or ()) for keys in left.values())
        return [left.pop(item.key, []) for item in items]

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
                    remove(self.path, now.file)
                writing.commit()
            self._report(row, "is damaged or missing: the chunk was dropped, and is computed again")
        except StoreError as error:
            self._report(row, f"is damaged or missing, and could not be removed ({error}): the chunk is computed again")
        with self._counting:
            self.damaged += 1
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

    def _most(self, namespace: str) -> float:
        """How large an entry may be."""
        limits = self.budget, self.quotas.get(namespace.partition(SCOPE_SEPARATOR)[0])
        return min((limit for limit in limits if limit is not None), default=math.inf)

    def _make_room(self, writing: Writing, size: int, namespace: str) -> list[Row]:
        """Takes the least recently used entries out of the manifest, until `size` more bytes fit.

        First those of the namespace, into its quota, then of all, into the budget.
        """
        rows: list[Row] = []
        owner = namespace.partition(SCOPE_SEPARATOR)[0]
        if (quota := self.quotas.get(owner)) is not None:
            rows += writing.least_used(writing.bytes_of(owner) + size - quota, owner)
            writing.remove(row.key for row in rows)
        if self.budget is not None:
            more = writing.least_used(writing.total_bytes() + size - self.budget)
            writing.remove(row.key for row in more)
            rows += more
        return rows

    def _write_all(self, items: Sequence[NewEntry], files: ExitStack) -> Iterator[_Unfinished]:
        """The files of entries, on the disk under names that do not count; they go when `files` closes."""
        if len(items) == 1:
            yield self._write(items[0], files)
            return
        with ThreadPoolExecutor(_WRITERS, "blendrag-write") as pool:
            yield from pool.map(lambda item: self._write(item, files), items)

    def _write(self, item: NewEntry, files: ExitStack) -> _Unfinished:
        now = time.time()
        row = Row(item.key, item.fingerprint, item.namespace, 0, item.entry.tokens, "",
                  dtype_name(item.entry.k.dtype), json.dumps(list(item.entry.k.shape)), now, now)
        with ExitStack() as mine:
            folder, final = mine.enter_context(folder_of(self.path, row.file, make=True))
            file, name = mine.enter_context(unfinished(folder, item.key))
            size, checksum = write_entry(file, item.entry, metadata_of(row))
            files.push(mine.pop_all())
        return _Unfinished(replace(row, bytes=size, checksum=checksum), item.tokens, folder, name, final)

    def _publish(self, writing: Writing, files: Sequence[_Unfinished]) -> dict[str, list[str]]:
        """Makes files entries; returns which keys left to make room, by the keys for which they did."""
        left: dict[str, list[str]] = {}
        self.manifest.flush(writing)
        try:
            for file in files:
                _rename(file)
            for folder in {os.fstat(file.folder).st_ino: file.folder for file in files}.values():
                os.fsync(folder)
            leaving: list[Row] = []
            for file in files:
                rows = self._make_room(writing, file.row.bytes, file.row.namespace)
                writing.add(file.row, file.tokens)
                left[file.row.key] = [row.key for row in rows]
                leaving += rows
            for old in leaving:  # now, as after the commit somebody may store it again
                try:
                    remove(self.path, old.file)
                except OSError as error:  # the next opening tries again
                    _log.warning("%s cannot be removed to make room: %s", self.path / old.file, error)
            writing.commit()
        except BaseException:
            for file in files:
                with suppress(FileNotFoundError):
                    os.unlink(file.final, dir_fd=file.folder)
            raise
        return left

    def _remove(self, writing: Writing, rows: list[Row]) -> None:
        """Removes entries; one whose file cannot be removed stays, and is an error once the others are gone."""
        gone: list[str] = []
        failure: OSError | None = None
        for row in rows:
            try:
                remove(self.path, row.file)
                gone.append(row.key)
            except OSError as error:
                failure = failure or error
        writing.remove(gone)
        writing.commit()
        if failure is not None:
            raise failure

    def _load(self, row: Row, pin: bool) -> KVEntry | None:
        """The entry in its file; None where something else is there, whatever it is."""
        with explained(self.path):
            try:
                with folder_of(self.path, row.file) as (folder, name):
                    return read_entry(folder, name, row, pin)
            except OSError as error:
                if error.errno in _OF_THE_PROCESS:
                    raise
                return None

    def _report(self, row: Row, what: str) -> None:
        """One line in the log for each file, however often it is asked for."""
        with self._counting:
            if row.key in self._reported or len(self._reported) > _REPORTED:
                return
            self._reported.add(row.key)
        _log.warning("%s %s", self.path / row.file, what)

    def _tidy(self) -> None:
        """Removes what crashed processes left: files without a row, rows without a file, unfinished files.

        Whatever else has the name of an entry's file costs that entry.
        """
        found = scan(self.path)
        odd = 0
        if self.manifest.has_damaged_rows():
            with self.manifest.writing() as writing:
                odd = writing.remove_odd()
                writing.commit()
        files = self.manifest.files()
        orphans = (found.entries | found.others) - set(files.values())
        lost = [key for key, file in files.items() if file not in found.entries]
        if orphans or lost:
            # Others may be at work: judge again while they cannot be.
            with self.manifest.writing() as writing:
                rows = {file: writing.row(Path(file).stem) for file in orphans}
                orphans = {file for file, row in rows.items() if row is None or row.file != file}
                lost = [key for key in lost if not self._has_file(files[key])]
                writing.remove(lost)
                for file in {*orphans, *(files[key] for key in lost)}:
                    with suppress(OSError):  # what cannot be removed is not served either
                        remove(self.path, file)
                writing.commit()
        if orphans and self.manifest.new:
            _log.warning("%s has no manifest, or an empty one: %d entries of before were removed", self.path,
                         len(orphans))
        elif orphans or lost or odd:
            _log.info("%s: removed %d files and %d rows of interrupted writes or damage", self.path, len(orphans),
                      len(lost) + odd)
        for place in found.unfinished:
            remove_if_abandoned(self.path, place)

    def _has_file(self, place: str) -> bool:
        """Whether a regular file is there."""
        try:
            with folder_of(self.path, place) as (folder, name):
                return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
        except OSError:
            return False


def _rename(file: _Unfinished) -> None:
    """Gives a file its name."""
    try:
        os.replace(file.name, file.final, src_dir_fd=file.folder, dst_dir_fd=file.folder)
    except IsADirectoryError:
        vacate(file.folder, file.final)
        os.replace(file.name, file.final, src_dir_fd=file.folder, dst_dir_fd=file.folder)


def _writable(path: Path) -> bool:
    """Whether a store can be written to.

    Raises:
        StoreError: it cannot, and there is none yet.
    """
    manifest = path / FILE
    there = os.path.lexists(manifest)
    if os.access(path, os.W_OK | os.X_OK) and (not there or os.access(manifest, os.W_OK)):
        return True
    if not there:
        raise unwritable(path)
    return False
