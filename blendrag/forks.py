"""What a fork leaves behind: threads, event loops and child processes stay with the process that made them."""

from __future__ import annotations

import os

from blendrag.errors import EngineClosedError


class Owner:
    """The process that started an engine."""

    def __init__(self) -> None:
        self._current = os.getpid  # at the interpreter's end, when generators are closed, modules may be gone
        self._pid = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of it."""
        return self._pid != self._current()

    def require(self) -> None:
        """Refuses what would wait for ever in a fork.

        Look here before any lock: another thread may have held it when the process was forked.

        Raises:
            EngineClosedError: this process is a fork of the owner.
        """
        if self.forked:
            raise EngineClosedError("the engine belongs to the process that this one was forked from: start engines "
                                    "after the fork (gunicorn without --preload), or spawn processes instead")
