"""Content indexes, one for each model and namespace, in step with what is stored."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np

from blendrag.store.index import ContentIndex, Match
from blendrag.store.keys import DIGEST_BYTES, TokenIds, entry_key
from blendrag.store.manifest import Manifest
from blendrag.store.ram import Owner

_OWNERS = 1024


class FindableInRam:
    """The indexes of a store without a disk, which tells of each entry.  Not thread-safe: its store holds a lock."""

    def __init__(self) -> None:
        self._indexes: dict[Owner, ContentIndex] = {}

    def add(self, key: str, owner: Owner, prefix: bytes, ids: bytes) -> None:
        """Makes an entry findable."""
        self._indexes.setdefault(owner, ContentIndex()).add(key, prefix, ids)

    def forget(self, key: str, owner: Owner) -> None:
        """Makes an entry unfindable, if it was not."""
        index = self._indexes.get(owner)
        if index is not None and index.remove(key) and not len(index):
            del self._indexes[owner]

    def find(self, ids: TokenIds, owner: Owner) -> list[Match]:
        """What an owner's index finds."""
        index = self._indexes.get(owner)
        return index.find(ids) if index else []


@dataclass
class _Follower:
    """An index, and what of the manifest it has seen."""

    index: ContentIndex = field(default_factory=ContentIndex)
    version: int = -1
    added: int = 0
    removed: int = 0


class FindableOnDisk:
    """The indexes of a store with a manifest, which they follow: whoever writes, in whatever process, is seen.

    Each is built when it is first asked, in about a second for 100,000 chunks.  Of more than `_OWNERS` the smallest is
    forgotten first: it is built anew in no time, and clients may ask with any number of salts.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._followers: dict[Owner, _Follower] = {}
        self._lock = threading.Lock()

    def find(self, ids: TokenIds, owner: Owner) -> list[Match]:
        """What an owner's index finds, as of the last commit.

        Raises:
            StoreError: the manifest cannot be read.
        """
        with self._lock:
            follower = self._follower(owner)
            version = self._manifest.version()
            if version != follower.version:
                self._catch_up(follower, owner)
                follower.version = version
            return follower.index.find(ids)

    def forget(self) -> None:
        """Frees the indexes' memory; what is found next builds them anew."""
        with self._lock:
            self._followers.clear()

    def _follower(self, owner: Owner) -> _Follower:
        follower = self._followers.get(owner)
        if follower is None:
            if len(self._followers) >= _OWNERS:
                del self._followers[min(self._followers, key=lambda other: len(self._followers[other].index))]
            follower = self._followers[owner] = _Follower()
        return follower

    def _catch_up(self, follower: _Follower, owner: Owner) -> None:
        more = True
        while more:
            news = self._manifest.news(owner, follower.added, follower.removed)
            if news.lost:
                follower.index = ContentIndex()
            for key in news.removed:
                follower.index.remove(key)
            for key, prefix, ids in news.added:
                if _is_named(key, owner, prefix, ids):
                    follower.index.add(key, prefix, ids)
            follower.added, follower.removed, more = news.last_added, news.last_removed, news.more


def _is_named(key: object, owner: Owner, prefix: object, ids: object) -> bool:
    """Whether a row's tokens are those that its key was made of: rows that were exchanged find nothing."""
    if not isinstance(prefix, bytes) or not isinstance(ids, bytes) or len(prefix) != DIGEST_BYTES or len(ids) % 4:
        return False
    return key == entry_key(str(owner.fingerprint), str(owner.namespace), prefix, np.frombuffer(ids, "<u4"))
