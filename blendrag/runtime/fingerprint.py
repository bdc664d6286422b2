"""The fingerprint that an engine's entries are named after, and how it changes while the engine runs.

Entries of other weights must not be found, and those from before a reset of the caches neither.  So the engine takes
another fingerprint then; on a disk that several engines share, nothing of the others is touched.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from uuid import uuid4

from blake3 import blake3


class Fingerprint:
    """What an engine's entries are named after now.

    The scheduler side and the worker side share this object where they share a process.  In processes of their own
    each has one, and the messages of each step carry the changes: of `generation` to the worker, of `model` back.

    Attributes:
        model: identifies the loaded model; empty before it is loaded.
        generation: drawn when the caches are reset; empty before the first time.
        at_start: the value with which the engine started, which others of the same model share.
    """

    def __init__(self) -> None:
        self.model = self.generation = self.at_start = ""
        self._listeners: list[Callable[[str], object]] = []

    @property
    def value(self) -> str:
        """The fingerprint, 64 hex digits."""
        return blake3(f"{self.model}/{self.generation}".encode()).hexdigest() if self.generation else self.model

    @property
    def own(self) -> bool:
        """Whether no other engine has it, nor this one after a restart."""
        return self.value != self.at_start

    def start(self, model: str) -> None:
        """Takes the fingerprint of the model that was loaded."""
        self.model = self.at_start = model
        self.generation = ""

    def reset(self) -> None:
        """Leaves behind all that is stored."""
        self.change(generation=uuid4().hex)

    def change(self, *, model: str | None = None, generation: str | None = None) -> None:
        """Replaces a part, and calls the listeners where the value is another one now."""
        before = self.value
        self.model = self.model if model is None else model
        self.generation = self.generation if generation is None else generation
        if self.value != before:
            for listener in self._listeners:
                listener(self.value)

    def subscribe(self, listener: Callable[[str], object]) -> None:
        """Has `listener` called with each new value."""
        self._listeners.append(listener)

    def close(self) -> None:
        """Drops the listeners."""
        self._listeners.clear()


_engines: weakref.WeakValueDictionary[str, Fingerprint] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def fingerprint_of(engine_id: str) -> Fingerprint:
    """The fingerprint of an engine: the same object for all its parts in this process."""
    with _lock:
        found = _engines.get(engine_id)
        if found is None:
            found = _engines[engine_id] = Fingerprint()
        return found


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)
