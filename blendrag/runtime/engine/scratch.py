"""Where chunks are kept when there is no `store_path` and an engine consists of several processes.

The scheduler side must see what the workers have stored, so they share a folder, for as long as the engine lives.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

from blendrag.errors import StoreError
from blendrag.private import create, is_own_folder, make_own_folder, open_regular

_PREFIX = "blendrag-"
_LOCK = "owner.lock"


def scratch_folder(engine_id: str) -> Path:
    """The folder of an engine, which only this user may enter; all its processes find the same one.

    Raises:
        StoreError: it cannot be made, or another user has put something in its place.
    """
    name = blake3(engine_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]  # an id may hold slashes
    path = Path(tempfile.gettempdir(), f"{_PREFIX}{os.getuid()}-{name}")
    try:
        make_own_folder(path)
    except OSError as error:
        raise StoreError(f"{path} cannot be used ({error.strerror}): set store_path, or another folder as TMPDIR"
                         ) from error
    return path


class Scratch:
    """Owns the folder: removes it at the end, and what engines that were killed left behind.

    Raises:
        StoreError: another process owns it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with suppress(FileExistsError):
                create(path / _LOCK).close()
            self._lock = open_regular(path / _LOCK)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            why = "another engine uses it" if error.errno == errno.EAGAIN else error.strerror
            raise StoreError(f"{path} cannot be used ({why}): set store_path") from error
        for other in path.parent.glob(f"{_PREFIX}{os.getuid()}-*"):
            if other != path and is_own_folder(other):
                _remove_if_abandoned(other)

    def close(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _remove_if_abandoned(folder: Path) -> None:
    with suppress(OSError), open_regular(folder / _LOCK) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
