"""What the manifest says about entries."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any

import torch

from blendrag.errors import StoreError
from blendrag.store.entry import DTYPES, KVEntry, dtype_name
from blendrag.store.files import place_of
from blendrag.store.keys import TokenIds
from blendrag.store.windows import chunk_bytes

KEY = re.compile(r"[0-9a-f]{64}")
FINGERPRINT = re.compile(r"[0-9A-Za-z_-]+")

_DTYPES = {dtype_name(dtype): dtype for dtype in DTYPES}
_HEADER = 2**20  # a safetensors file's, at most: the namespace is in it


@dataclass(frozen=True)
class Row:
    """One entry: how to know it.

    Attributes:
        bytes: size of the file.
        checksum: blake3 of the file's bytes, 64 hex digits.
        shape: of keys and of values, as JSON.
        created, last_used: seconds since 1970; `last_used` is brought up to date with the next write.
    """

    key: str
    fingerprint: str
    namespace: str
    bytes: int
    tokens: int
    checksum: str
    dtype: str
    shape: str
    created: float
    last_used: float

    @classmethod
    def of(cls, values: Sequence[Any]) -> Row | None:
        """The row that has these values, in the order of the attributes; None where they are not those of an entry."""
        row = cls(*values)
        texts = (row.namespace, row.checksum, row.dtype, row.shape)
        if not all(isinstance(text, str) for text in texts) or not isinstance(row.bytes, int):
            return None
        return row if is_named(row.key, row.fingerprint) else None

    @property
    def file(self) -> str:
        """Path relative to the store's folder."""
        return place_of(self.fingerprint, self.key)

    def form(self) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """Dtype and shape of keys and of values; None where they are not those of an entry of this size."""
        try:
            shape = tuple(json.loads(self.shape))
        except (ValueError, TypeError, RecursionError):
            return None
        dtype = _DTYPES.get(self.dtype)
        if dtype is None or len(shape) != 4 or not all(type(size) is int and size > 0 for size in shape):
            return None
        size = 2 * prod(shape) * dtype.itemsize
        return (dtype, shape) if shape[1] == self.tokens and size < self.bytes <= size + _HEADER else None


def is_key(key: object) -> bool:
    """Whether this is the key of an entry."""
    return isinstance(key, str) and KEY.fullmatch(key) is not None


def is_named(key: object, fingerprint: object) -> bool:
    """Whether an entry's file can be named by these: what is no key or fingerprint may lead out of the store."""
    return is_key(key) and isinstance(fingerprint, str) and FINGERPRINT.fullmatch(fingerprint) is not None


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


@dataclass(frozen=True)
class NewEntry:
    """An entry that is to be stored.

    Attributes:
        key: from `entry_key`, of the same fingerprint and namespace.
        fingerprint: the model's: letters, digits, "-" and "_".
        tokens: what it is found by; None for one that is found by its key alone.
    """

    key: str
    entry: KVEntry
    fingerprint: str
    namespace: str
    tokens: Tokens | None = None


COLUMNS = ", ".join(field.name for field in fields(Row))
ROW = f"SELECT {COLUMNS} FROM entries WHERE key = ?"
