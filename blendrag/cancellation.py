"""Stops what another thread waits for: a request that nobody wants any more must not be computed on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Cancellation:
    """Calls functions once it is cancelled, at once where it is already.  Safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._functions: list[Callable[[], None]] = []
        self._cancelled = False

    def on_cancel(self, function: Callable[[], None]) -> None:
        """Has `function` called, in the thread that cancels or in this one."""
        with self._lock:
            if not self._cancelled:
                self._functions.append(function)
                return
        function()

    def cancel(self) -> None:
        """Calls the functions, each once."""
        with self._lock:
            self._cancelled = True
            functions, self._functions = self._functions, []
        for function in functions:
            function()


_current: ContextVar[Cancellation | None] = ContextVar("cancellation", default=None)


@contextmanager
def cancelled_by(cancellation: Cancellation) -> Iterator[None]:
    """Requests that are handed in here, in this thread, are stopped by `cancellation`."""
    token = _current.set(cancellation)
    try:
        yield
    finally:
        _current.reset(token)


def stopped_with(function: Callable[[], None]) -> None:
    """Has `function` called when the work around is cancelled; nothing where nobody may cancel it."""
    if (cancellation := _current.get()) is not None:
        cancellation.on_cancel(function)
