"""Finds stored chunks in a prompt by their tokens alone, wherever they are.

Each chunk is known by one window of 16 of its tokens, its anchor.  A look-up hashes all windows of the
prompt (Rabin-Karp), keeps those that can be an anchor, and compares the chunk's tokens with the prompt's
around them.  What is reported was compared token by token: a hash that collides costs time, nothing else.
"""

from __future__ import annotations

import struct
from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass

from blendrag.store import windows
from blendrag.store.compare import LEFT_EDGE, Content, Look, without_overlaps
from blendrag.store.keys import TokenIds
from blendrag.store.windows import WINDOW, HashFilter, chunk_bytes, prompt_ids

_WINDOW = struct.Struct(f"<{WINDOW}I")
_FEW = 8


@dataclass(frozen=True)
class Match:
    """Tokens of a prompt that are tokens of a stored chunk.

    Attributes:
        start, end: where in the prompt.
        offset: of `start` in the chunk; `[offset, offset + end - start)` are the chunk's tokens.
        tokens: length of the stored chunk.
        variants: the chunk's keys, by the digest of what it was encoded behind.
    """

    start: int
    end: int
    offset: int
    tokens: int
    variants: Mapping[bytes, str]


class ContentIndex:
    """The stored chunks of one model and namespace, by their tokens.  Not thread-safe: its store holds a lock."""

    def __init__(self) -> None:
        self._contents: dict[bytes, Content] = {}
        self._keys: dict[str, Content] = {}
        self._single: dict[int, Content] = {}
        self._shared: dict[int, list[Content]] = {}
        self._filter = HashFilter()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def add(self, key: str, prefix: bytes, ids: TokenIds | bytes) -> None:
        """Makes an entry findable, in place of another one of the same tokens and prefix.

        Chunks of fewer than 16 tokens are not found.

        Args:
            prefix: digest of what it was encoded behind.
            ids: the chunk's tokens, or their bytes: four each, little-endian.

        Raises:
            StoreError: no token ids.
        """
        self.remove(key)
        raw = ids if isinstance(ids, bytes) else chunk_bytes(ids)
        if len(raw) < 4 * WINDOW:
            return
        content = self._contents.get(raw)
        if content is None:
            content = self._contents[raw] = Content(raw, len(raw) // 4)
            self._anchor(content)
        self._keys.pop(content.variants.get(prefix, ""), None)
        content.variants = {**content.variants, prefix: key}
        self._keys[key] = content

    def remove(self, key: str) -> bool:
        """Forgets an entry; says whether there was one."""
        content = self._keys.pop(key, None)
        if content is None:
            return False
        content.variants = {other: name for other, name in content.variants.items() if name != key}
        if not content.variants:
            del self._contents[content.raw]
            self._release(content)
        return True

    def find(self, ids: TokenIds) -> list[Match]:
        """The stored chunks in a prompt, in order, without overlaps.

        A match is as long as chunk and prompt agree around the anchor.  It may begin up to 8 tokens
        behind the chunk's beginning, and end anywhere.  Where matches overlap, the longest counts, of
        equally long ones the first.

        Raises:
            StoreError: no token ids.
        """
        prompt = prompt_ids(ids)
        if len(prompt) < WINDOW or not self._keys:
            return []
        hashes = windows.window_hashes(prompt)
        places = self._filter.possible(hashes)
        look = Look(prompt)
        runs = look.singles(self._single, places, hashes[places])
        if self._shared:
            runs += look.shared(self._shared, places, hashes[places])
        return [Match(start, end, offset, content.tokens, content.variants)
                for start, end, offset, content in without_overlaps(runs)]

    def _anchor(self, content: Content) -> None:
        """Chooses the anchor: a window that no other chunk has for its own, and that occurs once in this chunk."""
        raw = content.raw
        first = min(LEFT_EDGE, (content.tokens - WINDOW) // 2)
        free: tuple[int, int] | None = None
        for offset in range(first, content.tokens - WINDOW + 1, WINDOW):
            tokens = _WINDOW.unpack_from(raw, 4 * offset)
            value = windows.window_hash(tokens)
            if value in self._single or value in self._shared:
                continue
            window = raw[4 * offset : 4 * (offset + WINDOW)]
            if len(set(tokens)) > _FEW and raw.find(window) == 4 * offset and raw.find(window, 4 * offset + 4) < 0:
                content.anchor, content.hash = offset, value
                self._single[value] = content
                break
            free = free or (offset, value)
        else:
            content.single = False
            content.anchor, content.hash = free or (first, windows.window_hash(_WINDOW.unpack_from(raw, 4 * first)))
            insort(self._shared.setdefault(content.hash, []), content, key=lambda other: -other.tokens)
        if self._filter.full:
            self._filter = HashFilter([*self._single, *self._shared])
        else:
            self._filter.add(content.hash)

    def _release(self, content: Content) -> None:
        if content.single:
            del self._single[content.hash]
            return
        bucket = self._shared[content.hash]
        bucket.remove(content)
        if not bucket:
            del self._shared[content.hash]
