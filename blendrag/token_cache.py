"""Token ids of texts that were tokenised before: RAG applications send the same chunks over and over."""

from __future__ import annotations

import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakValueDictionary

import numpy as np
from blake3 import blake3

if TYPE_CHECKING:
    import numpy.typing as npt

Kind = Literal["chunk", "text", "continued text"]
"""What the ids of a text depend on besides the text; see `SegmentTokenizer`."""

_BYTES = 64 * 2**20
_LARGEST_SHARE = 16
"""A text that would take more than this part of the budget is not kept: it alone would push out many others."""
_ENTRY_BYTES = 400
"""Of an entry's key, array and links, besides the text's and the ids' own bytes."""


class TokenCache:
    """Ids by text, the most recently used that fit into `budget` bytes.  Safe to call from several threads.

    Attributes:
        bytes: of the texts and ids that are kept.
    """

    def __init__(self, budget: int = _BYTES) -> None:
        self.budget = budget
        self.bytes = 0
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[Kind, str], tuple[npt.NDArray[np.int64], int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def ids(self, kind: Kind, text: str, tokenize: Callable[[str], list[int]]) -> npt.NDArray[np.int64]:
        """The ids of a text, int64 [tokens], read-only.

        Args:
            tokenize: makes them where they are not kept; what it raises is passed on, and nothing is kept then.
        """
        key = kind, text
        with self._lock:
            if (entry := self._entries.get(key)) is not None:
                self._entries.move_to_end(key)
                return entry[0]
        ids = np.array(tokenize(text), np.int64)
        ids.flags.writeable = False
        size = sys.getsizeof(text) + ids.nbytes + _ENTRY_BYTES
        if size <= self.budget // _LARGEST_SHARE:
            with self._lock:
                self._add(key, ids, size)
        return ids

    def _add(self, key: tuple[Kind, str], ids: npt.NDArray[np.int64], size: int) -> None:
        if key in self._entries:
            return  # another thread was quicker
        self._entries[key] = ids, size
        self.bytes += size
        while self.bytes > self.budget:
            _, (_, freed) = self._entries.popitem(last=False)
            self.bytes -= freed


_caches: WeakValueDictionary[bytes, TokenCache] = WeakValueDictionary()
_caches_lock = threading.Lock()


def token_cache_of(tokenizer: Any) -> TokenCache:
    """The cache of all tokenizers in this process that give every text the same ids, as long as one of them lives.

    One whose ids may follow from more than what is compared here, such as a model's own code, has a cache for itself.
    """
    content = _content(tokenizer)
    if content is None:
        return TokenCache()
    with _caches_lock:
        cache = _caches.get(content)
        if cache is None:
            cache = _caches[content] = TokenCache()
        return cache


def _content(tokenizer: Any) -> bytes | None:
    """Digest of all that the ids follow from; None where that is not known."""
    kind = type(tokenizer)
    libraries = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if not getattr(tokenizer, "is_fast", False) or not libraries <= {"transformers", "vllm", "builtins"}:
        return None
    # Settings that are attributes of the Python object, too: `split_special_tokens` for instance.
    settings = repr([kind.__qualname__, tokenizer.init_kwargs, tokenizer.all_special_tokens, tokenizer.unk_token_id,
                     sorted(tokenizer.added_tokens_decoder.items()), getattr(tokenizer, "split_special_tokens", None)])
    return blake3(tokenizer.backend_tokenizer.to_str().encode()).update(settings.encode("utf-8", "replace")).digest()


def _forget_in_child() -> None:
    """A fork may have happened while another thread held a lock."""
    global _caches_lock
    _caches_lock = threading.Lock()
    _caches.clear()


os.register_at_fork(after_in_child=_forget_in_child)
