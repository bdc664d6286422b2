"""This rank's share of the chunk store, as the passes use it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod

import torch

from blendrag.errors import StoreError
from blendrag.runtime.passes.device_tier import DeviceTier
from blendrag.runtime.passes.ranks import Ranks
from blendrag.runtime.passes.read_ahead import ReadAhead
from blendrag.store import ChunkStore, KVEntry, entry_key
from blendrag.store.rows import NewEntry, Tokens

logger = logging.getLogger(__name__)

_AHEAD_LEAST, _AHEAD_MOST = 2**28, 4 * 2**30
"""Bytes of entries that are read before their passes begin; in between as many as the RAM tier has."""


class Entries:
    """Entries of one model, in the scopes that callers name.  What one rank lacks, none of them has.

    All methods but `key`, `share`, `put_shares`, `release` and `close` are meetings of all ranks: a failure of one of
    them is one of all.

    Args:
        fingerprint: this rank's part of the model's identity.
        tier: entries on the device; None on the CPU.
        form: dtype, layers, KV heads and head size that an entry must have; kernels trust them.
    """

    def __init__(self, store: ChunkStore, fingerprint: str, tier: DeviceTier | None = None,
                 form: tuple[torch.dtype, int, int, int] | None = None) -> None:
        self.ranks = Ranks()
        self.fingerprint = self.ranks.common(fingerprint)
        self.tier = tier
        self._store = store
        self._form = form
        self._ahead = ReadAhead(store.peek, store.load, min(max(store.ram_bytes, _AHEAD_LEAST), _AHEAD_MOST),
                                None if tier is None else tier.device)

    def rename(self, fingerprint: str) -> None:
        """Has entries named after another fingerprint from now on, and frees the memory of those there are."""
        self._ahead.clear()
        if self.tier is not None:
            self.tier.clear()
        self._store.free(self.fingerprint)
        self.fingerprint = fingerprint

    def key(self, scope: str, prefix: bytes, ids: Sequence[int]) -> str:
        """The name of a chunk behind a prefix (a digest)."""
        return entry_key(self.fingerprint, scope, prefix, ids)

    def present(self, keys: Sequence[str]) -> set[str]:
        """Those of `keys` that are stored.

        Raises:
            StoreError: the store cannot be asked.
        """
        found = self.ranks.together(lambda: self._store.present([self.ranks.local(key) for key in keys]))
        have = self.ranks.agree([self.ranks.local(key) in found for key in keys])
        return {key for key, there in zip(keys, have, strict=True) if there}

    def get(self, keys: Sequence[str], tokens: Sequence[int] | None = None) -> list[KVEntry | None]:
        """The entries, in host memory; None where one cannot be had.

        Args:
            tokens: how long each must be at least.
        """
        least = tokens or [0] * len(keys)
        return self._agreed([self._read(self.ranks.local(key), count)
                             for key, count in zip(keys, least, strict=True)])

    def ready(self, requests: Mapping[str, Mapping[str, int]], wait_s: float = 0) -> list[bool]:
        """Whether the entries that each request needs are in memory; begins to read those that are not.

        Args:
            requests: the keys of entries, and how long each must be, by request.
            wait_s: how long to wait, where no request has all of its own.
        """
        def here() -> list[bool]:
            try:
                return [self._ahead.ready(request_id, self._sizes(tokens)) for request_id, tokens in requests.items()]
            except Exception as error:  # the other ranks wait for an answer; passes read what is not here
                logger.warning("stored chunks cannot be read in the background: %s", error)
                return [True] * len(requests)

        have = here()
        if wait_s and not any(have):
            self._ahead.wait(lambda: any(here()), wait_s)
            have = here()
        return self.ranks.agree(have)

    def release(self, request_id: str) -> None:
        """Keeps no entries in memory any more for a request that has loaded what it needs, or needs nothing."""
        self._ahead.release(request_id)

    def close(self) -> None:
        """Ends what is read."""
        self._ahead.clear()

    def load(self, keys: Sequence[str], tokens: Sequence[int] | None = None) -> list[KVEntry | None]:
        """`get` for a pass: those for which the device tier has room are on the device."""
        tier = self.tier
        if tier is None:
            return self.get(keys, tokens)
        held: list[KVEntry | None] = []
        for key, count in zip(keys, tokens or [0] * len(keys), strict=True):
            entry = tier.get(key)
            if entry is None:
                entry = self._read(self.ranks.local(key), count)
            else:
                self._store.touch(self.ranks.local(key))
            held.append(entry if entry is not None and entry.tokens >= count else None)
        agreed = {key: entry for key, entry in zip(keys, self._agreed(held), strict=True) if entry is not None}
        placed = self.ranks.together(lambda: tier.hold(agreed))
        return [placed.get(key) for key in keys]

    def put(self, scope: str, key: str, entry: KVEntry, prefix: bytes | None = None,
            ids: Sequence[int] | None = None) -> None:
        """Stores an entry, whose key is of this scope.

        With `prefix` and `ids` it is found wherever a prompt of the scope holds these tokens.

        Raises:
            StoreError: it cannot be written, on this rank or another.
        """
        self.ranks.together(lambda: self.put_shares([self.share(scope, key, entry, prefix, ids)]))

    def share(self, scope: str, key: str, entry: KVEntry, prefix: bytes | None = None,
              ids: Sequence[int] | None = None) -> NewEntry:
        """This rank's share of an entry, as it is stored."""
        tokens = None if self.ranks.rank else Tokens.of(entry, prefix, ids)  # one name of a chunk is enough
        return NewEntry(self.ranks.local(key), entry, self.fingerprint, scope, tokens)

    def put_shares(self, shares: Sequence[NewEntry]) -> None:
        """`put` of several entries on this rank alone, without a meeting: for a thread beside the one that runs passes.

        An entry that another rank failed to write is not used: `present` and `get` ask all of them.
        """
        self._store.put_all(shares)

    def delete(self, keys: Sequence[str]) -> int:
        """Deletes entries, wherever they are kept; returns how many there were.

        Raises:
            StoreError: one of them cannot be deleted, on this rank or another.
        """
        for key in keys:
            self._ahead.drop(self.ranks.local(key))
            if self.tier is not None:
                self.tier.drop(key)
        return self.ranks.together(lambda: sum(self._store.delete(self.ranks.local(key)) for key in keys))

    def _agreed(self, entries: list[KVEntry | None]) -> list[KVEntry | None]:
        have = self.ranks.agree([entry is not None for entry in entries])
        return [entry if there else None for entry, there in zip(entries, have, strict=True)]

    def _sizes(self, tokens: Mapping[str, int]) -> dict[str, int]:
        """Bytes of this rank's share of entries of so many tokens, where they are not on the device."""
        dtype, *shape = self._form or (torch.uint8, 0)
        row = 2 * prod(shape) * dtype.itemsize
        return {self.ranks.local(key): count * row for key, count in tokens.items()
                if self.tier is None or self.tier.get(key) is None}

    def _read(self, key: str, tokens: int) -> KVEntry | None:
        try:
            read = self._ahead.get(key)
            loaded = None if read is None else read.result()
            entry = self._store.get(key, loaded) if read is None or loaded is not None else None
        except Exception as error:  # the other ranks wait for an answer, whatever it is
            logger.warning("a stored chunk cannot be read, computing it: %s", error)
            return None
        if entry is None or (entry.tokens >= tokens and self._form in (None, _form(entry))):
            return entry
        logger.warning("the stored chunk %s is a %s, which is not of this model's form: it is dropped, and computed "
                       "again", key, entry)
        with suppress(StoreError):
            self._store.delete(key)
        return None


def _form(entry: KVEntry) -> tuple[torch.dtype, int, int, int]:
    layers, _, heads, size = entry.k.shape
    return entry.k.dtype, layers, heads, size
