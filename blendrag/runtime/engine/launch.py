"""Starts and ends an engine's process, whatever becomes of the event loop that it serves."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from blendrag.errors import EngineClosedError
from blendrag.forks import Owner
from blendrag.runtime.engine.failure import FailureNote

_SHUTDOWN_S = 30.0
"""Patience with a process that shuts down; killed sooner, it leaves shared memory and folders behind."""


class Launch:
    """Starts an engine's process and ends it, from any thread: the event loop that asked for it may be gone.

    Args:
        start: returns a running `AsyncLLM`, and what its process leaves when it dies.
    """

    def __init__(self, start: Callable[[], tuple[Any, FailureNote]]) -> None:
        self._start = start
        self._owner = Owner()
        self._lock = threading.Lock()
        self._ended = False
        self._running: tuple[Any, FailureNote] | None = None
        _launches.add(self)

    def __call__(self) -> tuple[Any, FailureNote]:
        """Blocks until the model is loaded.

        Raises:
            EngineClosedError: `end` was called meanwhile.
        """
        running = self._start()
        with self._lock:
            if not self._ended:
                self._running = running
                return running
        _shut_down(*running)
        raise EngineClosedError("the engine was closed while it started: make a new AsyncBlendEngine")

    def end(self) -> None:
        """Ends the process, and one that is being started as soon as it has; nothing in a fork."""
        if self._owner.forked:
            return
        with self._lock:
            self._ended = True
            running, self._running = self._running, None
        if running is not None:
            _shut_down(*running)

    def leave_to_parent(self) -> None:
        """Called in a fork: the process is not its to end."""
        from blendrag.runtime.compat import leave_to_parent

        if self._running is not None:
            leave_to_parent(self._running[0])


def _shut_down(llm: Any, note: FailureNote) -> None:
    llm.shutdown(_SHUTDOWN_S)
    note.remove()


_launches: weakref.WeakSet[Launch] = weakref.WeakSet()


def _after_fork() -> None:
    for launch in _launches:
        launch.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
