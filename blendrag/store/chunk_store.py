"""The chunk store: host RAM in front of an optional disk tier."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import torch

from blendrag.errors import StoreError
from blendrag.store.disk import DiskTier
from blendrag.store.entry import KVEntry, held_bytes, on_host
from blendrag.store.findable import FindableInRam, FindableOnDisk
from blendrag.store.index import Match
from blendrag.store.keys import TokenIds
from blendrag.store.ram import Owner, RamTier
from blendrag.store.rows import FINGERPRINT, KEY, NewEntry, Tokens
from blendrag.store.stats import StoreStats

_log = logging.getLogger(__name__)

RAM_BYTES = 4 * 2**30


class ChunkStore:
    """Entries by key, shared by threads and, where there is a disk tier, by processes.

    With a disk tier its manifest decides what exists: entries that another process wrote are there at
    once, and those that it deleted are gone, also from this process's RAM.  A folder that holds a store and cannot be
    written to is opened read-only.

    Args:
        path: folder of the disk tier; None for host RAM only, where what does not fit is forgotten.
        ram_bytes: budget of the RAM tier, in bytes.  A larger entry is kept on the disk alone.
        pin_memory: keep the RAM tier in page-locked memory; ignored, with a warning, without CUDA.
        disk_bytes: budget of the disk tier, in bytes of all processes' files, at whose end the least recently
            used entries leave; a larger entry is not kept.  None for no limit.
        quotas: the same for the entries of single namespaces.

    Raises:
        StoreError: the store cannot be opened, read or written, or was closed.
    """

    def __init__(self, path: Path | str | None = None, ram_bytes: int = RAM_BYTES, pin_memory: bool = False,
                 disk_bytes: int | None = None, quotas: Mapping[str, int] | None = None) -> None:
        for name, size in (("ram_bytes", ram_bytes), ("disk_bytes", disk_bytes)):
            if size is not None and size < 0:
                raise StoreError(f"{name} is {size}: set it to 0 or more")
        self.path = None if path is None else Path(path).expanduser().absolute()
        self._findable = FindableInRam()
        self._disk: DiskTier | None = None
        if self.path is None:
            self._ram = RamTier(ram_bytes, self._findable.forget)
        else:
            self._disk = DiskTier(self.path, disk_bytes, quotas)
            self._found_on_disk = FindableOnDisk(self._disk.manifest)
            self._ram = RamTier(ram_bytes)
        self._pin_wanted, self._pin = pin_memory, False
        self._hits_ram = self._hits_disk = self._misses = 0
        self._lock = threading.Lock()
        self._users = 1
        self._process = os.getpid()

    def get(self, key: str, loaded: KVEntry | None = None) -> KVEntry | None:
        """The entry in host memory, or None where there is none or its file is damaged.  Do not write to it.

        Args:
            loaded: what `peek` or `load` returned for it a moment ago, which is not read again.
        """
        self._require_open()
        row = self._disk.manifest.row(key) if self._disk else None
        gone = self._disk is not None and row is None
        with self._lock:
            if gone:
                self._ram.remove(key)
            entry = self._ram.get(key)
            if entry is None and not self._disk:
                entry = loaded
            self._hits_ram += entry is not None
            self._misses += entry is None and row is None
        if not self._disk or row is None:
            return entry
        if entry is None:
            pin = self._pinning()
            entry = self._disk.read(row, pin) if loaded is None else loaded
            with self._lock:
                self._hits_disk += entry is not None
                self._misses += entry is None
                if entry is not None and self._users:
                    self._ram.put(key, entry, Owner(row.fingerprint, row.namespace), held_bytes(entry, pin))
        if entry is not None:
            self._disk.manifest.touch(key)
        return entry

    def peek(self, keys: Collection[str]) -> dict[str, KVEntry]:
        """Those of the entries that are in RAM, which are not used thereby; none where the store is closed."""
        with self._lock:
            return self._ram.peek(keys)

    def load(self, key: str) -> KVEntry | None:
        """The entry as the disk has it, for a later `get`; None where there is none or its file is damaged."""
        self._require_open()
        row = self._disk.manifest.row(key) if self._disk else None
        return self._disk.read(row, self._pinning()) if self._disk and row is not None else None

    def touch(self, key: str) -> None:
        """Notes that an entry was used, by one who had a copy of it."""
        with self._lock:
            self._ram.get(key)
        if self._disk:
            self._disk.manifest.touch(key)

    def put(self, key: str, entry: KVEntry, *, fingerprint: str, namespace: str, prefix: bytes | None = None,
            ids: TokenIds | None = None) -> None:
        """Stores an entry, durably where there is a disk tier; if that fails, nothing is stored.

        The store may keep the tensors themselves: do not write to them afterwards.

        Args:
            key: from `entry_key`, of the same fingerprint and namespace.
            fingerprint: the model's: letters, digits, "-" and "_".
            prefix: digest of what the chunk was encoded behind; given together with `ids`.
            ids: the chunk's tokens, by which `find` finds it; without them it is found by its key alone.
        """
        self.put_all([NewEntry(key, entry, fingerprint, namespace, Tokens.of(entry, prefix, ids))])

    def put_all(self, items: Sequence[NewEntry]) -> None:
        """`put` of several entries: all are durable when it returns, which takes less time than one by one.

        If that fails, none of them is stored.
        """
        self._require_open()
        for item in items:
            if not KEY.fullmatch(item.key):
                raise StoreError(f"{item.key!r} is no key: use entry_key(...)")
            if not FINGERPRINT.fullmatch(item.fingerprint):
                raise StoreError(f"{item.fingerprint!r} is no fingerprint: use letters, digits, '-' and '_'")
            _require_text(item.namespace)
        pin = self._pinning()
        items = [replace(item, entry=on_host(item.entry, pin)) for item in items]
        gone: list[list[str] | None] = self._disk.put(items) if self._disk else [[] for _ in items]
        with self._lock:
            for item, keys in zip(items, gone, strict=True):
                owner, tokens = Owner(item.fingerprint, item.namespace), item.tokens
                for old in [item.key] if keys is None else keys:
                    self._ram.remove(old)
                if self._users and keys is not None:
                    self._ram.put(item.key, item.entry, owner, held_bytes(item.entry, pin))
                    if tokens and not self._disk and item.key in self._ram:
                        self._findable.add(item.key, owner, tokens.prefix, tokens.ids)

    def find(self, ids: TokenIds, *, fingerprint: str, namespace: str) -> list[Match]:
        """The chunks in a prompt that are stored now, in order, without overlaps; see `ContentIndex.find`.

        Args:
            ids: the prompt; a list is the quickest.

        Raises:
            StoreError: also where `ids` are no token ids.
        """
        self._require_open()
        _require_text(namespace)
        owner = Owner(fingerprint, namespace)
        if self._disk:
            return self._found_on_disk.find(ids, owner)
        with self._lock:
            return self._findable.find(ids, owner)

    def __contains__(self, key: str) -> bool:
        return bool(self.present([key]))

    def present(self, keys: Collection[str]) -> set[str]:
        """Those of `keys` that are stored, with one look at the manifest for all of them."""
        self._require_open()
        if self._disk:
            return self._disk.manifest.present(keys)
        with self._lock:
            return self._ram.present(keys)

    def unloaded(self, keys: Collection[str]) -> set[str]:
        """Those of `keys` that `get` would look for on the disk."""
        with self._lock:
            return {key for key in keys if key not in self._ram} if self._disk else set()

    def delete(self, key: str) -> bool:
        """Removes an entry; says whether there was one."""
        self._require_open()
        on_disk = self._disk.delete(key) if self._disk else False
        with self._lock:
            return self._ram.remove(key) or on_disk

    def clear(self, namespace: str | None = None, fingerprint: str | None = None) -> int:
        """Removes the entries of a namespace and its scopes, of a model, of both, or all of them; returns how many."""
        self._require_open()
        _require_text(namespace or "")
        of = Owner(fingerprint, namespace)
        on_disk = self._disk.clear(of) if self._disk else 0
        with self._lock:
            return max(self._ram.clear(of), on_disk)

    def free(self, fingerprint: str) -> int:
        """Lets the RAM tier go of a model's entries; returns how many.  Without a disk tier they are gone."""
        self._require_open()
        with self._lock:
            return self._ram.clear(Owner(fingerprint))

    def keys(self) -> list[str]:
        """The keys of all entries, in order."""
        self._require_open()
        if self._disk:
            return self._disk.manifest.keys()
        with self._lock:
            return sorted(self._ram.keys())

    @property
    def ram_bytes(self) -> int:
        """Budget of the RAM tier, in bytes."""
        return self._ram.budget

    @property
    def read_only(self) -> bool:
        """Whether nothing can be stored, as the disk tier's folder cannot be written to."""
        return self._disk is not None and self._disk.read_only

    @property
    def stats(self) -> StoreStats:
        """Contents and counters."""
        self._require_open()
        disk_entries, disk_bytes = self._disk.manifest.totals() if self._disk else (0, 0)
        with self._lock:
            return StoreStats(
                entries=disk_entries if self._disk else len(self._ram),
                ram_entries=len(self._ram), ram_bytes=self._ram.bytes,
                disk_entries=disk_entries, disk_bytes=disk_bytes,
                hits_ram=self._hits_ram, hits_disk=self._hits_disk, misses=self._misses,
                damaged=self._disk.damaged if self._disk else 0, evicted=self._ram.evicted,
                disk_evicted=self._disk.evicted if self._disk else 0,
            )

    def join(self, ram_bytes: int, pin_memory: bool, disk_bytes: int | None,
             quotas: Mapping[str, int] | None = None) -> bool:
        """Counts one more user, for `open_store`; False where the store is closed or another process's.

        The tiers grow to the largest budget among the users, and RAM is pinned where one of them asks for it.  The
        quotas of the latest user that has some count.
        """
        if self._process != os.getpid():
            return False
        with self._lock:
            if not self._users:
                return False
            self._users += 1
            self._ram.budget = max(self._ram.budget, ram_bytes)
            self._pin_wanted |= pin_memory
            if self._disk and quotas:
                self._disk.quotas = dict(quotas)
            if self._disk and self._disk.budget is not None:
                self._disk.budget = None if disk_bytes is None else max(self._disk.budget, disk_bytes)
            return True

    def close(self) -> None:
        """Ends one user's use; with its last user the store closes, and every further use is an error."""
        if self._process != os.getpid():
            return
        with self._lock:
            last = self._users == 1
            self._users = max(0, self._users - 1)
            if last:
                self._ram.clear(Owner())
        if last and self._disk:
            self._found_on_disk.forget()
            self._disk.manifest.close()

    def __enter__(self) -> ChunkStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._process != os.getpid():
            raise StoreError("the chunk store belongs to the process that opened it: open it again after a fork")
        if not self._users:
            raise StoreError("the chunk store is closed: open it again")

    def _pinning(self) -> bool:
        if self._pin_wanted and not self._pin:
            # Asked for at the first use, as the question itself starts CUDA.
            self._pin = torch.cuda.is_available()
            if not self._pin:
                _log.warning("pin_memory is ignored: this machine has no CUDA device")
                self._pin_wanted = False
        return self._pin


def _require_text(namespace: str) -> None:
    try:
        namespace.encode()
    except UnicodeEncodeError as error:
        raise StoreError(f"the namespace {namespace!r} holds half a surrogate pair: name another") from error
