"""What the operating system and SQLite complain about, in a sentence that ends with the remedy."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blendrag.errors import StoreError
from blendrag.private import FOLDER_MODE

_ANOTHER = "set another store_path"
_FULL = f"has no space left: free some, or {_ANOTHER}"
_READ_ONLY = f"cannot be written to: change its permissions, or {_ANOTHER}"
_LOCKED = f"is locked by another process: wait for it to finish, or {_ANOTHER}"
_DAMAGED = f"has a damaged manifest: delete the folder, or {_ANOTHER}"
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
    errno.ELOOP: f"has a link in the place of a folder of its own: remove the link, or {_ANOTHER}",
    errno.EAGAIN: _LOCKED,
    errno.ENOENT: "was removed while in use: close the store and open it again",
    errno.EMFILE: "needs more open files than the process may have: raise the limit (ulimit -n)",
}

_DATABASE = {
    sqlite3.SQLITE_FULL: _FULL,
    sqlite3.SQLITE_READONLY: _READ_ONLY,
    sqlite3.SQLITE_PERM: _READ_ONLY,
    sqlite3.SQLITE_CANTOPEN: f"has a manifest that cannot be opened: check its permissions, or {_ANOTHER}",
    sqlite3.SQLITE_NOTADB: f"has a manifest that is not a database: delete the folder, or {_ANOTHER}",
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    # What tables of another form answer.
    sqlite3.SQLITE_ERROR: _DAMAGED,
    sqlite3.SQLITE_MISMATCH: _DAMAGED,
    sqlite3.SQLITE_CONSTRAINT: _DAMAGED,
    sqlite3.SQLITE_TOOBIG: _DAMAGED,
    sqlite3.SQLITE_BUSY: _LOCKED,
}


def explain(error: OSError | sqlite3.Error, path: Path) -> StoreError:
    """The error as a `StoreError` about the store at `path`."""
    if isinstance(error, OSError):
        known = _SYSTEM.get(error.errno or 0)
    else:
        # The low byte is the kind, the rest says which system call.
        known = _DATABASE.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
    return StoreError(f"the store {path} {known or f'failed ({error}): check the disk, or {_ANOTHER}'}")


def unwritable(path: Path) -> StoreError:
    """What a write to a store that cannot be written to is answered with."""
    return StoreError(f"the store {path} {_READ_ONLY}")


def damaged(path: Path) -> StoreError:
    """What is said of a manifest that holds something else than it should."""
    return StoreError(f"the store {path} {_DAMAGED}")


def make_folder(path: Path) -> None:
    """Makes a folder of the store unless it is there; StoreError where it cannot be made.

    What is made is this user's alone; a folder that is there keeps its permissions.
    """
    try:
        path.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
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
    except MemoryError as error:
        raise StoreError(f"the store {path} needs more memory than there is: free some, or set a smaller ram_bytes"
                         ) from error
