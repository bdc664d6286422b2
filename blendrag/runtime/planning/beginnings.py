"""Which blended beginnings of prompts vLLM's prefix cache may hold.

A turn of a conversation, an agent's next step, a retry and a second question about the same documents begin as an
earlier prompt did.  The blocks of a blended prompt are filed under salted hashes (`blendrag.runtime.planning.salt`):
whoever knows the salt finds them, and those of the answer behind them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from blake3 import blake3

from blendrag.policies import Policy
from blendrag.runtime.planning.salt import Salts

_LOOKS = 4
"""Beginnings that a request looks at, at most: blocks of the longest may have left the cache."""


class Beginnings:
    """The salts of blended prompts, by the unsalted hash of each of their blocks, which names all tokens up to its end.

    Args:
        blocks: how many are remembered; those blended longest ago are forgotten first.
    """

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._beginnings: OrderedDict[bytes, Salts] = OrderedDict()

    def add(self, kind: bytes, hashes: Sequence[bytes], salts: Salts) -> None:
        """Takes a prompt that was blended.

        Args:
            kind: `kind_of` what it was blended with.
            hashes: unsalted, of its blocks that are not exact.
        """
        for block_hash in hashes:
            key = kind + block_hash
            self._beginnings[key] = salts
            self._beginnings.move_to_end(key)
        while len(self._beginnings) > self._blocks:
            self._beginnings.popitem(last=False)

    def find(self, kind: bytes, hashes: Sequence[bytes]) -> Iterator[Salts]:
        """What blended beginnings of a prompt are filed under, the longest first, each once.

        Args:
            hashes: unsalted, of the prompt's blocks.
        """
        seen: set[Salts] = set()
        for block_hash in reversed(hashes):
            salts = self._beginnings.get(kind + block_hash)
            if salts is not None and salts not in seen:
                seen.add(salts)
                yield salts
                if len(seen) == _LOOKS:
                    return

    def __len__(self) -> int:
        return len(self._beginnings)

    def clear(self) -> None:
        """Forgets all of them."""
        self._beginnings.clear()


def kind_of(policy: Policy, sparse_attention: int | None) -> bytes:
    """What prompts must have in common besides tokens to share blended blocks: what was recomputed, and how."""
    return blake3(repr([policy.serial, policy.settings(), sparse_attention]).encode()).digest(8)
