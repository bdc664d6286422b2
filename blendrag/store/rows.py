"""What the manifest says about entries."""

from __future__ import annotations

from dataclasses import dataclass, fields

from blendrag.errors import StoreError
from blendrag.store.entry import KVEntry
from blendrag.store.keys import TokenIds
from blendrag.store.windows import chunk_bytes


@dataclass(frozen=True)
class Row:
    """One entry: where it is, and how to know it.

    Attributes:
        file: path relative to the store's folder.
        bytes: size of the file.
        checksum: blake3 of the file's bytes, 64 hex digits.
        shape: of keys and of values, as JSON.
        created, last_used: seconds since 1970; `last_used` is brought up to date with the next write.
    """

    key: str
    fingerprint: str
    namespace: str
    file: str
    bytes: int
    tokens: int
    checksum: str
    dtype: str
    shape: str
    created: float
    last_used: float


@dataclass(frozen=True)
class News:
    """What happened to an owner's findable entries.  Removals come before additions.

    Attributes:
        added: key, prefix digest and token ids of each.
        removed: keys, of all owners.
        last_added, last_removed: numbers to ask with for the next news.
        more: there is more already.
        lost: too much was removed since: forget everything, and start from these numbers.
    """

    added: list[tuple[str, bytes, bytes]]
    removed: list[str]
    last_added: int
    last_removed: int
    more: bool = False
    lost: bool = False


@dataclass(frozen=True)
class Tokens:
    """What an entry is found by.

    Attributes:
        prefix: digest of what the chunk was encoded behind.
        ids: the chunk's token ids, four bytes each, little-endian.
    """

    prefix: bytes
    ids: bytes

    @classmethod
    def of(cls, entry: KVEntry, prefix: bytes | None, ids: TokenIds | None) -> Tokens | None:
        """What `ChunkStore.put` was given for an entry; None for one that is not to be found.

        Raises:
            StoreError: one is missing, or they are not the entry's.
        """
        if prefix is None and ids is None:
            return None
        if prefix is None or ids is None:
            raise StoreError("an entry is found by its prefix and its ids: pass both, or neither")
        if len(ids) != entry.tokens:
            raise StoreError(f"{len(ids)} ids were given for an entry of {entry.tokens} tokens: pass the chunk's own")
        return cls(prefix, chunk_bytes(ids))


COLUMNS = ", ".join(field.name for field in fields(Row))
ROW = f"SELECT {COLUMNS} FROM entries WHERE key = ?"
