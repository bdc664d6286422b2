"""Names of entries: a hash of everything that the KV of a chunk depends on."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from blendrag.errors import StoreError

TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]
"""Token ids; arrays are hashed without a copy of their own."""

SCOPE_SEPARATOR = ":"
"""Stands between a namespace and what divides it further; `BlendConfig.namespace` may not hold it."""

# blake3 derives unrelated functions from these, so a prefix can never pass for an entry.
_PREFIX = "blendrag 1 prefix token ids"
_ENTRY = "blendrag 1 chunk entry"

_FRESH_ENTRY = blake3(derive_key_context=_ENTRY)

DIGEST_BYTES = 32

NEUTRAL = blake3(b"neutral", derive_key_context=_PREFIX).digest()
"""Stands in for a prefix digest where a chunk was encoded behind nothing but an attention sink, to serve any prompt."""


def prefix_digest(ids: TokenIds = ()) -> bytes:
    """Digest of the tokens that precede a chunk, 32 bytes."""
    return _fresh().update(_id_bytes(ids)).digest()


def entry_key(fingerprint: str, namespace: str, prefix: bytes, chunk_ids: TokenIds) -> str:
    """The name of a chunk's entry, 64 hex digits.

    Args:
        fingerprint: identifies the model: weights, tokenizer, dtype, rope, parallel layout.
        namespace: chunks are shared within a namespace only.
        prefix: `prefix_digest` of the tokens that the chunk was encoded behind.
        chunk_ids: the chunk.
    """
    return entry_keys(fingerprint, namespace, (prefix,), chunk_ids)[0]


def entry_keys(fingerprint: str, namespace: str, prefixes: Iterable[bytes], chunk_ids: TokenIds) -> list[str]:
    """`entry_key` behind each of several prefixes."""
    head, content = _head(fingerprint, namespace), _id_bytes(chunk_ids)
    keys = []
    for prefix in prefixes:
        if len(prefix) != DIGEST_BYTES:
            raise StoreError(f"a prefix is named by {DIGEST_BYTES} bytes, not {len(prefix)}: use prefix_digest(ids)")
        # One update from the start is twice as fast as several: BLAKE3 then hashes whole pieces of 1 KiB side by side.
        keys.append(_FRESH_ENTRY.copy().update(b"".join((head, prefix, content))).hexdigest())
    return keys


def rank_keys(key: str, ranks: int) -> list[str]:
    """The names under which the tensor-parallel ranks keep their shares of an entry; the first one is `key` itself."""
    return [key, *(blake3(f"{key}/{rank}".encode()).hexdigest() for rank in range(1, ranks))]


class PrefixHasher:
    """`prefix_digest` of one prompt's beginnings: each goes on from the longest earlier one that is shorter."""

    def __init__(self, ids: TokenIds) -> None:
        self._content = _id_bytes(ids)
        self._ends = [0]
        self._hashers = {0: _fresh()}

    def digest(self, end: int) -> bytes:
        """`prefix_digest(ids[:end])`."""
        upto = 8 * end
        if not 0 <= upto <= len(self._content):
            raise StoreError(f"a prefix of {end} tokens is not within the prompt's {len(self._content) // 8}")
        if upto not in self._hashers:
            before = self._ends[bisect_right(self._ends, upto) - 1]
            self._hashers[upto] = self._hashers[before].copy().update(self._content[before:upto])
            insort(self._ends, upto)
        return self._hashers[upto].digest()


def _fresh() -> blake3:
    return blake3(derive_key_context=_PREFIX)


@lru_cache(256)
def _head(fingerprint: str, namespace: str) -> bytes:
    """What the hashed bytes of all entries of a model and namespace begin with."""
    texts = [text.encode("utf-8", "surrogatepass") for text in (fingerprint, namespace)]
    return b"".join(len(text).to_bytes(8, "little") + text for text in texts)


def _id_bytes(ids: TokenIds) -> memoryview:
    """Eight bytes a token, little-endian: as every id is as long as the next, no two lists share their bytes.

    Those of an array of such numbers are its own, not a copy.
    """
    array = np.asarray(ids)
    flat = array.ndim == 1 and (array.dtype.kind in "iu" or not array.size)
    if not flat or (array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max):
        raise StoreError("token ids must be a flat sequence of whole numbers: pass what the tokenizer returned")
    return np.ascontiguousarray(array, "<i8").view(np.uint8).data
