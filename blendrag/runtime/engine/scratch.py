"""Where chunks are kept when there is no `store_path` and an engine consists of several processes.

The scheduler half must see what the workers have stored, so they share a folder, for as long as the engine lives.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "blendrag-"
_LOCK = "owner.lock"


def scratch_path(engine_id: str) -> Path:
    """The folder of an engine; all its processes compute the same one."""
    return Path(tempfile.gettempdir(), f"{_PREFIX}{os.getuid()}-{engine_id}")


class Scratch:
    """Owns the folder: removes it at the end, and what engines that were killed left behind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(mode=0o700, exist_ok=True)
        self._lock = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for other in path.parent.glob(f"{_PREFIX}{os.getuid()}-*/{_LOCK}"):
            if other.parent != path:
                _remove_if_abandoned(other)

    def close(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_if_abandoned(lock: Path) -> None:
    with suppress(OSError), lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(lock.parent, ignore_errors=True)
