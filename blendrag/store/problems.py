"""What the operating system and SQLite complain about, in a sentence that ends with the remedy."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blendrag.errors import StoreError

_ANOTHER = "set another store_path"
_FULL = f"has no space left: free some, or {_ANOTHER}"
_READ_ONLY = f"cannot be written to: change its permissions, or {_ANOTHER}"
_NO_FOLDER = f"is not a folder: {_ANOTHER}"

_SYSTEM = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: f"is over its disk quota: free some space, or {_ANOTHER}",
    errno.EFBIG: f"may not hold files this large: raise the limit on file sizes (ulimit -f), or {_ANOTHER}",
    errno.EROFS: _READ_ONLY,
    errno.EACCES: _READ_ONLY,
    errno.EPERM: _READ_ONLY,
    errno.EEXIST: _NO_FOLDER,
    errno.ENOTDIR: _NO_FOLDER,
    errno.ENOENT: "was removed while in use: close the store and open it again",
    errno.EMFILE: "needs more open files than the process may have: raise the limit (ulimit -n)",
}

_DATABASE = {
    sqlite3.SQLITE_FULL: _FULL,
    sqlite3.SQLITE_READONLY: _READ_ONLY,
    sqlite3.SQLITE_PERM: _READ_ONLY,
    sqlite3.SQLITE_CANTOPEN: f"has a manifest that cannot be opened: check its permissions, or {_ANOTHER}",
    sqlite3.SQLITE_NOTADB: f"has a manifest that is not a database: delete the folder, or {_ANOTHER}",
    sqlite3.SQLITE_CORRUPT: f"has a damaged manifest: delete the folder, or {_ANOTHER}",
    sqlite3.SQLITE_BUSY: f"is locked by another process: wait for it to finish, or {_ANOTHER}",
}


def explain(error: OSError | sqlite3.Error, path: Path) -> StoreError:
    """The error as a `StoreError` about the store at `path`."""
    if isinstance(error, OSError):
        known = _SYSTEM.get(error.errno or 0)
    else:
        # The low byte is the kind, the rest says which system call.
        known = _DATABASE.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
    return StoreError(f"the store {path} {known or f'failed ({error}): check the disk, or {_ANOTHER}'}")


def make_folder(path: Path) -> None:
    """Makes a folder of the store unless it is there; StoreError where it cannot be made, or written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except FileNotFoundError as error:  # as /proc says
        raise StoreError(f"the store {path} cannot be made there: {_ANOTHER}") from error
    except OSError as error:
        raise explain(error, path) from error


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns system and database errors into `StoreError`s about the store at `path`."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise explain(error, path) from error
