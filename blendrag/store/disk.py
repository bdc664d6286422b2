"""The disk tier: one safetensors file per entry, and a manifest that says which files count.

An entry exists when its row does.  Its file is complete and on the disk before the row is written, under
the manifest's write lock; so a crash at any moment leaves at most a file without a row, which is never
served, and which the next opening removes.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from blendrag.errors import StoreError
from blendrag.store.entry import KVEntry, dtype_name
from blendrag.store.manifest import Manifest, Row, Writing
from blendrag.store.problems import explained
from blendrag.store.ram import Owner
from blendrag.store.tensorfile import read_entry, write_entry

_log = logging.getLogger(__name__)

_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO}

# Nothing but what has these names is ever removed: people put a store among files of their own.
_OUTER = re.compile(r"[0-9A-Za-z_-]{1,16}")
_INNER = re.compile(r"[0-9a-f]{2}")
_ENTRY = re.compile(r"[0-9a-f]{64}\.safetensors")
_UNFINISHED = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{8}\.tmp")


class DiskTier:
    """The entries in a folder, which is made if it is not there.  Threads and processes may share it.

    Raises:
        StoreError: the folder cannot be used; the message names the remedy.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = 0
        self._counting = threading.Lock()
        with explained(path):
            path.mkdir(parents=True, exist_ok=True)
            if not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "the folder is read-only")
            with _alone_in(path):
                self.manifest = Manifest(path)
                try:
                    self._tidy()
                    _sync_folder(path)
                    with suppress(PermissionError):
                        _sync_folder(path.parent)
                except BaseException:
                    self.manifest.close()
                    raise

    def put(self, key: str, entry: KVEntry, owner: Owner) -> None:
        """Writes an entry in host memory.  A key that is there keeps what it has: the same key means the same KV."""
        if self.manifest.row(key):
            return
        fingerprint, namespace = str(owner.fingerprint), str(owner.namespace)
        about = {"key": key, "fingerprint": fingerprint, "namespace": namespace}
        with explained(self.path), _unfinished(self._folder(fingerprint, key), key) as (file, unfinished):
            size, checksum = write_entry(file, entry, about)
            os.fsync(file.fileno())
            final = unfinished.with_name(f"{key}.safetensors")
            now = time.time()
            row = Row(key, fingerprint, namespace, str(final.relative_to(self.path)), size, entry.tokens, checksum,
                      dtype_name(entry.k.dtype), json.dumps(list(entry.k.shape)), now, now)
            with self.manifest.writing() as writing:
                if not writing.row(key):
                    self._publish(writing, unfinished, final, row)

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

    def _publish(self, writing: Writing, unfinished: Path, final: Path, row: Row) -> None:
        try:
            unfinished.replace(final)
            _sync_folder(final.parent)
            writing.add(row)
            self.manifest.flush(writing)
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

    def _folder(self, fingerprint: str, key: str) -> Path:
        folder = self.path
        for name in (fingerprint[:16], key[:2]):
            with suppress(FileExistsError):
                (folder / name).mkdir()
                _sync_folder(folder)
            folder /= name
        return folder

    def _tidy(self) -> None:
        """Removes what crashed processes left: files without a row, rows without a file, unfinished files."""
        entries, unfinished = self._scan()
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
            _remove_if_abandoned(path)

    def _scan(self) -> tuple[set[str], list[Path]]:
        entries: set[str] = set()
        unfinished: list[Path] = []
        for outer in _folders(self.path, _OUTER):
            for inner in _folders(outer, _INNER):
                where = f"{outer.name}/{inner.name}/"
                for name in os.listdir(inner):  # noqa: PTH208 a Path for each of 100,000 files takes a second
                    if _ENTRY.fullmatch(name) and name.startswith(inner.name):
                        entries.add(where + name)
                    elif _UNFINISHED.fullmatch(name):
                        unfinished.append(inner / name)
        return entries, unfinished


def _folders(path: Path, named: re.Pattern[str]) -> list[Path]:
    try:
        with os.scandir(path) as found:
            return [path / item.name for item in found if named.fullmatch(item.name) and item.is_dir()]
    except PermissionError:  # a folder of somebody else's
        return []


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Lets one process at a time open the store."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def _unfinished(folder: Path, key: str) -> Iterator[tuple[FileIO, Path]]:
    """A file to write to, locked as long as its writer lives, and gone afterwards unless it was renamed."""
    while True:
        path = folder / f".{key}.{secrets.token_hex(4)}.tmp"
        with FileIO(path, "x") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                # A process that opens the store may have removed the file before it was locked.
                if os.fstat(file.fileno()).st_nlink:
                    yield file, path
                    return
            finally:
                path.unlink(missing_ok=True)


def _remove_if_abandoned(path: Path) -> None:
    with suppress(FileNotFoundError, BlockingIOError), FileIO(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
