"""The host-RAM tier: recently used entries, within a budget of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from blendrag.store.entry import KVEntry
from blendrag.store.keys import SCOPE_SEPARATOR


@dataclass(frozen=True)
class Owner:
    """Whom an entry belongs to; None in a query stands for everyone.

    A namespace may be divided into scopes, "NAMESPACE:..." (`blendrag.runtime.planning.scope`).
    """

    fingerprint: str | None = None
    namespace: str | None = None

    def includes(self, other: Owner) -> bool:
        """Whether `other` is one of those that this describes; a namespace includes its scopes."""
        return self.fingerprint in (None, other.fingerprint) and (
            self.namespace in (None, other.namespace)
            or str(other.namespace).startswith(f"{self.namespace}{SCOPE_SEPARATOR}"))


class RamTier:
    """The most recently used entries that fit into `budget` bytes.  Not thread-safe: its store holds a lock.

    Args:
        forgotten: is told of every entry that leaves.
    """

    def __init__(self, budget: int, forgotten: Callable[[str, Owner], object] = lambda key, owner: None) -> None:
        self.budget = budget
        self._forgotten = forgotten
        self.bytes = 0
        self.evicted = 0
        self._held: OrderedDict[str, tuple[KVEntry, Owner, int]] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def present(self, keys: Iterable[str]) -> set[str]:
        """Those of `keys` that are held."""
        return set(filter(self._held.__contains__, keys))

    def keys(self) -> list[str]:
        """Keys, the least recently used first."""
        return list(self._held)

    def get(self, key: str) -> KVEntry | None:
        """The entry, which now counts as the most recently used."""
        held = self._held.get(key)
        if held is None:
            return None
        self._held.move_to_end(key)
        return held[0]

    def peek(self, keys: Iterable[str]) -> dict[str, KVEntry]:
        """Those of the entries that are held."""
        return {key: self._held[key][0] for key in keys if key in self._held}

    def put(self, key: str, entry: KVEntry, owner: Owner, size: int) -> None:
        """Keeps an entry of `size` bytes, at the cost of the least recently used ones.

        One that is larger than the whole budget is not kept, and displaces nothing.
        """
        self.remove(key)
        if size > self.budget:
            return
        while self.bytes + size > self.budget:
            self.evicted += 1
            self.remove(next(iter(self._held)))
        self._held[key] = (entry, owner, size)
        self.bytes += size

    def remove(self, key: str) -> bool:
        """Forgets the entry; says whether there was one."""
        held = self._held.pop(key, None)
        if held is None:
            return False
        self.bytes -= held[2]
        self._forgotten(key, held[1])
        return True

    def clear(self, of: Owner) -> int:
        """Forgets the entries of an owner; returns how many."""
        keys = [key for key, (_, owner, _) in self._held.items() if of.includes(owner)]
        return sum(map(self.remove, keys))
