"""This rank's share of the chunk store, as the passes use it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from blendrag.errors import StoreError
from blendrag.runtime.passes.device_tier import DeviceTier
from blendrag.runtime.passes.ranks import Ranks
from blendrag.store import ChunkStore, KVEntry, entry_key

logger = logging.getLogger(__name__)


class Entries:
    """Entries of one model in one namespace.  What one rank lacks, none of them has.

    Args:
        fingerprint: this rank's part of the model's identity.
        tier: entries on the device; None on the CPU.
    """

    def __init__(self, store: ChunkStore, namespace: str, fingerprint: str, tier: DeviceTier | None = None) -> None:
        self.ranks = Ranks()
        self.fingerprint = self.ranks.common(fingerprint)
        self.tier = tier
        self._store = store
        self._namespace = namespace

    def key(self, prefix: bytes, ids: Sequence[int]) -> str:
        """The name of a chunk behind a prefix (a digest)."""
        return entry_key(self.fingerprint, self._namespace, prefix, ids)

    def present(self, keys: Sequence[str]) -> set[str]:
        """Those of `keys` that are stored."""
        found = self._store.present([self.ranks.local(key) for key in keys])
        have = self.ranks.agree([self.ranks.local(key) in found for key in keys])
        return {key for key, there in zip(keys, have, strict=True) if there}

    def get(self, keys: Sequence[str]) -> list[KVEntry | None]:
        """The entries, in host memory; None where one cannot be had."""
        return self._agreed([self._read(self.ranks.local(key)) for key in keys])

    def load(self, keys: Sequence[str]) -> list[KVEntry | None]:
        """`get` for a pass: those for which the device tier has room are on the device."""
        if self.tier is None:
            return self.get(keys)
        held = {key: self.tier.get(key) for key in keys}
        for key, entry in held.items():
            if entry is None:
                held[key] = self._read(self.ranks.local(key))
            else:
                self._store.touch(self.ranks.local(key))
        agreed = self._agreed(list(held.values()))
        placed = self.tier.hold({key: entry for key, entry in zip(keys, agreed, strict=True) if entry is not None})
        return [placed.get(key) for key in keys]

    def put(self, key: str, entry: KVEntry, prefix: bytes | None = None, ids: Sequence[int] | None = None) -> None:
        """Stores an entry; with `prefix` and `ids` it is found wherever a prompt holds these tokens."""
        if self.ranks.rank:
            prefix = ids = None  # one name of a chunk is enough
        self._store.put(self.ranks.local(key), entry, fingerprint=self.fingerprint, namespace=self._namespace,
                        prefix=prefix, ids=ids)

    def delete(self, keys: Sequence[str]) -> int:
        """Deletes entries, wherever they are kept; returns how many there were."""
        found = 0
        for key in keys:
            if self.tier is not None:
                self.tier.drop(key)
            found += self._store.delete(self.ranks.local(key))
        return found

    def _agreed(self, entries: list[KVEntry | None]) -> list[KVEntry | None]:
        have = self.ranks.agree([entry is not None for entry in entries])
        return [entry if there else None for entry, there in zip(entries, have, strict=True)]

    def _read(self, key: str) -> KVEntry | None:
        try:
            return self._store.get(key)
        except StoreError as error:
            logger.warning("a stored chunk cannot be read, computing it: %s", error)
            return None
