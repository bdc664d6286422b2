"""Stores computed entries beside the forwards that compute the next ones."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from blendrag.runtime.passes.entries import Entries
from blendrag.runtime.passes.host_copy import HostCopy

_GROUP = 16
_PENDING_BYTES = 2**30


@dataclass
class _Write:
    """An entry to store; see `Entries.share`."""

    scope: str
    key: str
    copy: HostCopy
    prefix: bytes | None
    ids: Sequence[int] | None
    done: Future[None] = field(default_factory=Future)


class EntryWriter:
    """Stores entries in order; what comes while some are written is stored together, with one commit.

    Its thread starts when there is something to write and ends when there is nothing left.

    Args:
        device: the thread's CUDA device, where memory is page-locked for one.
    """

    def __init__(self, entries: Entries, device: torch.device | None = None) -> None:
        self.entries = entries
        self._device = device
        self._changed = threading.Condition()
        self._writes: deque[_Write] = deque()
        self._bytes = 0
        self._thread: threading.Thread | None = None

    def add(self, scope: str, key: str, copy: HostCopy, prefix: bytes | None = None,
            ids: Sequence[int] | None = None) -> Future[None]:
        """Stores this rank's share of an entry; waits while a gigabyte is not written yet.

        Returns:
            What is done when the entry is stored, durably where there is a disk tier, or has failed.
        """
        write = _Write(scope, key, copy, prefix, ids)
        with self._changed:
            self._changed.wait_for(lambda: self._bytes < _PENDING_BYTES)
            self._writes.append(write)
            self._bytes += copy.nbytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="blendrag-store")
                self._thread.start()
        return write.done

    def close(self) -> None:
        """Returns when all is written."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _work(self) -> None:
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while True:
            with self._changed:
                group = [self._writes.popleft() for _ in range(min(_GROUP, len(self._writes)))]
                if not group:
                    self._thread = None
                    return
            try:
                self.entries.put_shares([
                    self.entries.share(write.scope, write.key, write.copy.entry(), write.prefix, write.ids)
                    for write in group])
            except Exception as error:  # whoever waits for the entries deals with it
                failure: Exception | None = error
            else:
                failure = None
            with self._changed:
                self._bytes -= sum(write.copy.nbytes for write in group)
                self._changed.notify_all()
            for write in group:
                if failure is None:
                    write.done.set_result(None)
                else:
                    write.done.set_exception(failure)
