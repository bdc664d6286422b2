"""Names of entries: a hash of everything that the KV of a chunk depends on."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
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
    if len(prefix) != DIGEST_BYTES:
        raise StoreError(f"a prefix is named by {DIGEST_BYTES} bytes, not {len(prefix)}: use prefix_digest(ids)")
    hasher = blake3(derive_key_context=_ENTRY)
    for text in (fingerprint, namespace):
        content = text.encode("utf-8", "surrogatepass")
        hasher.update(len(content).to_bytes(8, "little") + content)
    return hasher.update(prefix).update(_id_bytes(chunk_ids)).hexdigest()


def rank_keys(key: str, ranks: int) -> list[str]:
    """The names under which the tensor-parallel ranks keep their shares of an entry; the first one is `key` itself."""
    return [key, *(blake3(f"{key}/{rank}".encode()).hexdigest() for rank in range(1, ranks))]


class PrefixHasher:
    """`prefix_digest` of one prompt's beginnings: each goes on from the longest earlier one that is shorter."""

    def __init__(self, ids: TokenIds) -> None:
        self._content = memoryview(_id_bytes(ids))
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


def _id_bytes(ids: TokenIds) -> bytes:
    """Eight bytes a token, little-endian: as every id is as long as the next, no two lists share their bytes."""
    array = np.asarray(ids)
    flat = array.ndim == 1 and (array.dtype.kind in "iu" or not array.size)
    if not flat or (array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max):
        raise StoreError("token ids must be a flat sequence of whole numbers: pass what the tokenizer returned")
    return array.astype("<i8").tobytes()
