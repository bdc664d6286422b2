"""Stores that several parts of one process share."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path

from blendrag.store.chunk_store import RAM_BYTES, ChunkStore

_stores: weakref.WeakValueDictionary[tuple[str, str], ChunkStore] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def open_store(path: Path | str | None = None, ram_bytes: int = RAM_BYTES, pin_memory: bool = False,
               disk_bytes: int | None = None, *, name: str | None = None,
               quotas: Mapping[str, int] | None = None) -> ChunkStore:
    """The store at `path`: the same object for everyone in this process, each of whom closes it once.

    A store without a path is known by its `name`: an engine and the connector inside it pass the same
    one to meet.  With neither, the store is new and the caller's own.  Where users ask for different
    settings, the largest `ram_bytes` and `disk_bytes` count, where None is the largest, and `pin_memory`
    where any of them wants it.

    Raises:
        StoreError: the store cannot be opened.
    """
    if path is not None:
        known = ("path", str(Path(path).expanduser().resolve()))
    elif name is not None:
        known = ("name", name)
    else:
        return ChunkStore(None, ram_bytes, pin_memory, disk_bytes, quotas)
    with _lock:
        store = _stores.get(known)
        if store is None or not store.join(ram_bytes, pin_memory, disk_bytes, quotas):
            store = _stores[known] = ChunkStore(path, ram_bytes, pin_memory, disk_bytes, quotas)
        return store


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)
