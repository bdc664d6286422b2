"""Reads entries in the background, from the moment a request that needs them arrives."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from blendrag.store import KVEntry

_THREADS = 4


@dataclass
class _Request:
    """What one request needs.

    Attributes:
        sizes: bytes of each entry, by key.
        begun: its reads have begun; before, other requests' entries take the memory.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    begun: bool = False


class ReadAhead:
    """Entries that requests will need, read in the order of the requests, an entry that several need once.

    An entry stays here until the last request that needs it is released, whatever leaves the RAM tier meanwhile.
    Threads start when there is something to read and end when there is nothing left.

    Args:
        peek: those of the named entries that are in memory, by key.
        read: an entry from the disk, by key; called on threads.
        budget: bytes of entries from the disk that are here at a time; one request's may be more.
        device: the threads' CUDA device, where memory is page-locked for one.
    """

    def __init__(self, peek: Callable[[Sequence[str]], Mapping[str, KVEntry]],
                 read: Callable[[str], KVEntry | None], budget: int, device: torch.device | None = None) -> None:
        self._peek = peek
        self._read = read
        self._budget = budget
        self._device = device
        self._changed = threading.Condition()
        self._requests: dict[str, _Request] = {}
        self._entries: dict[str, Future[KVEntry | None]] = {}
        self._sizes: dict[str, int] = {}  # of those entries that come from the disk
        self._queue: deque[str] = deque()
        self._threads: set[threading.Thread] = set()

    def ready(self, request_id: str, sizes: Mapping[str, int]) -> bool:
        """Whether the entries of a request are here, damaged ones included; begins to read those that are not.

        Args:
            sizes: bytes of each entry, about, by key.
        """
        if not sizes:
            return True
        with self._changed:
            request = self._requests.setdefault(request_id, _Request())
            request.sizes.update(sizes)
            if request.begun:
                self._take(request)
            else:
                self._begin()
            return request.begun and all(self._entries[key].done() for key in sizes)

    def get(self, key: str) -> Future[KVEntry | None] | None:
        """What came of reading an entry; None where that was not asked for, or goes on."""
        with self._changed:
            read = self._entries.get(key)
            return read if read is not None and read.done() else None

    def wait(self, until: Callable[[], bool], seconds: float) -> None:
        """Returns when `until` holds, which is asked after each read, or after so many seconds."""
        end = time.monotonic() + seconds
        with self._changed:
            while not until() and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)

    def release(self, request_id: str) -> None:
        """Lets go of what no other request needs, and of reads that have not begun."""
        with self._changed:
            request = self._requests.pop(request_id, None)
            for key in request.sizes if request is not None else ():
                if not any(key in other.sizes for other in self._requests.values() if other.begun):
                    self._forget(key)
            self._begin()

    def drop(self, key: str) -> None:
        """Forgets an entry, which was deleted."""
        with self._changed:
            self._forget(key)

    def clear(self) -> None:
        """Forgets everything; returns when the threads have ended."""
        with self._changed:
            self._requests.clear()
            self._entries.clear()
            self._sizes.clear()
            self._queue.clear()
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def _forget(self, key: str) -> None:
        self._entries.pop(key, None)
        if self._sizes.pop(key, None) is not None and key in self._queue:
            self._queue.remove(key)

    def _begin(self) -> None:
        """Begins with the requests whose turn it is: in order, so that a large one is not starved by small ones."""
        full = False
        for request in self._requests.values():
            if request.begun:
                continue
            here = self._peek([key for key in request.sizes if key not in self._entries])
            missing = sum(size for key, size in request.sizes.items() if key not in self._entries and key not in here)
            held = sum(size for key, size in self._sizes.items() if key not in request.sizes)
            full |= bool(missing and held and held + missing > self._budget)
            if not full or not missing:
                request.begun = True
                self._take(request)

    def _take(self, request: _Request) -> None:
        """Gets the entries of a request: from memory, or from the disk."""
        keys = [key for key in request.sizes if key not in self._entries]
        here = self._peek(keys)
        for key in keys:
            self._entries[key] = Future()
            if key in here:
                self._entries[key].set_result(here[key])
            else:
                self._sizes[key] = request.sizes[key]
                self._queue.append(key)
        self._start()

    def _start(self) -> None:
        """Has a thread for each read that has not begun, up to a few beside those that are at work."""
        for _ in range(min(_THREADS - len(self._threads), len(self._queue))):
            thread = threading.Thread(target=self._work, name="blendrag-read")
            self._threads.add(thread)
            thread.start()

    def _work(self) -> None:
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while True:
            with self._changed:
                key = self._queue.popleft() if self._queue else ""
                if not key:
                    self._threads.remove(threading.current_thread())
                    return
                future = self._entries[key]
            try:
                entry = self._read(key)
            except Exception as error:  # whoever needs the entry deals with it
                future.set_exception(error)
            else:
                future.set_result(entry)
            with self._changed:
                self._changed.notify_all()
