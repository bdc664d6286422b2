"""What is stored, as the scheduler side asks for it."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from blendrag.config import BlendConfig
from blendrag.errors import StoreError
from blendrag.runtime.messages import ModelFacts
from blendrag.store import ChunkStore, Match, entry_key
from blendrag.store.keys import entry_keys, rank_keys

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

logger = logging.getLogger(__name__)

_REMEMBERED = 4096


class Lookup:
    """The entries of one model, scope by scope.  A store that fails is one that has nothing.

    Attributes:
        facts: the model; the worker side tells it when the engine starts, before any request comes.
    """

    facts: ModelFacts

    def __init__(self, config: BlendConfig, store: ChunkStore) -> None:
        self.config = config
        self.store = store
        self._prefixes: OrderedDict[str, None] = OrderedDict()

    def key(self, scope: str, digest: bytes, ids: npt.NDArray[np.int64] | Sequence[int]) -> str:
        """The name of a chunk's entry behind a prefix."""
        return entry_key(self.facts.fingerprint, scope, digest, ids)

    def keys(self, scope: str, digests: Iterable[bytes], ids: npt.NDArray[np.int64] | Sequence[int]) -> list[str]:
        """The names of a chunk's entries behind several prefixes."""
        return entry_keys(self.facts.fingerprint, scope, digests, ids)

    def present(self, keys: Collection[str]) -> set[str]:
        """Those of `keys` that every rank has stored."""
        ranks = {key: rank_keys(key, self.facts.ranks) for key in keys} if self.facts.ranks > 1 else {}
        try:
            found = self.store.present([known for many in ranks.values() for known in many] if ranks else keys)
        except StoreError as error:
            logger.warning("the store cannot be asked, prefilling in full: %s", error)
            return set()
        return {key for key, many in ranks.items() if found.issuperset(many)} if ranks else found

    def matches(self, scope: str, ids: npt.NDArray[np.int64]) -> list[Match]:
        """A scope's stored chunks in token ids, wherever they are."""
        if not self.config.match:
            return []
        try:
            return self.store.find(ids, fingerprint=self.facts.fingerprint, namespace=scope)
        except StoreError as error:
            logger.warning("the store cannot be searched, prefilling in full: %s", error)
            return []

    def seen(self, prefix_key: str) -> bool:
        """Whether an earlier prompt had this prefix: one that comes only once need not be stored."""
        before = prefix_key in self._prefixes
        self._prefixes[prefix_key] = None
        self._prefixes.move_to_end(prefix_key)
        if len(self._prefixes) > _REMEMBERED:
            self._prefixes.popitem(last=False)
        return before
