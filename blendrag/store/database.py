"""Connections to a manifest's SQLite file."""

from __future__ import annotations

import errno
import sqlite3
import stat
from contextlib import suppress
from pathlib import Path

from blendrag.errors import StoreError
from blendrag.private import create


def make_file(path: Path) -> bool:
    """Makes the file of a database unless it is there, for this user alone; SQLite's own files get its permissions.

    Returns:
        whether there was none, or an empty one.
    """
    with suppress(FileExistsError):
        create(path).close()
    return path.lstat().st_size == 0


def require_regular_files(path: Path) -> None:
    """A FIFO, device or link in the place of a database, or of a file that SQLite keeps beside it, is refused by name.

    SQLite would wait for ever, or follow it.

    Raises:
        StoreError: there is one.
    """
    for suffix in ("", "-wal", "-shm", "-journal"):
        file = path.with_name(path.name + suffix)
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(file.lstat().st_mode):
                raise StoreError(f"{file} is not a regular file: remove it, or set another store_path")


def connect(path: Path, busy_s: float) -> sqlite3.Connection:
    """A connection that any thread may use, one at a time."""
    return _set_up(sqlite3.connect(path, busy_s, isolation_level=None, check_same_thread=False))


def connect_read_only(path: Path, busy_s: float) -> sqlite3.Connection:
    """A connection to a database that cannot be written to.

    On a read-only volume SQLite can use neither locks nor a log: the file is taken as it is, without what is in a log.

    Raises:
        OSError: there is no such file.
        sqlite3.Error: it is no database, or cannot be read.
    """
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, "there is no manifest", str(path))
    uri = path.absolute().as_uri()
    try:
        return _readable(f"{uri}?mode=ro", busy_s)
    except sqlite3.OperationalError:
        return _readable(f"{uri}?immutable=1", busy_s)


def _readable(uri: str, busy_s: float) -> sqlite3.Connection:
    connection = sqlite3.connect(uri, busy_s, isolation_level=None, check_same_thread=False, uri=True)
    try:
        connection.execute("SELECT 1 FROM sqlite_master").fetchall()
        return _set_up(connection)
    except BaseException:
        connection.close()
        raise


def _set_up(connection: sqlite3.Connection) -> sqlite3.Connection:
    # Text that is no UTF-8 is no name of ours: it matches nothing, and is no error.
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    connection.execute("PRAGMA trusted_schema = OFF")
    return connection
