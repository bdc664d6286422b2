"""Tokenises a prompt segment by segment, so that a chunk's ids never depend on its neighbours."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from typing import Any

from blendrag.prompt import BlendPrompt, Chunk

_GUARD = "\n"


@dataclass(frozen=True)
class TokenizedPrompt:
    """Token ids, and where the chunks lie in them.

    Attributes:
        ids: the prompt.
        spans: `(start, end)` of each chunk, in order, ends exclusive.
    """

    ids: list[int]
    spans: tuple[tuple[int, int], ...]


class SegmentTokenizer:
    """A Hugging Face tokenizer that encodes text and chunks separately.  Safe to call from several threads."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._lock = threading.Lock()
        added = {token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
        control = sorted((c for c in added | set(tokenizer.all_special_tokens) if c.strip()), key=len, reverse=True)
        self._control = re.compile(f"(?=({'|'.join(map(re.escape, control))}))") if control else None
        bare = self._encode("a")
        whole = list(tokenizer.encode("a", add_special_tokens=True))
        at = next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), 0)
        self.leading_ids = whole[:at]
        """What the tokenizer puts before a prompt, BOS for many; empty where it puts nothing."""
        self.trailing_ids = whole[at + len(bare) :]
        # SentencePiece tokenizers put a space before each text they encode: wrong inside a prompt.
        self._adds_space = tokenizer.decode(self._encode("x") + self._encode("y")) != "xy"

    def text_ids(self, text: str, *, first: bool = False) -> list[int]:
        """Ids of prompt text, in which special tokens such as `<|im_start|>` count as such.

        Args:
            first: the text begins the prompt; otherwise it continues one.
        """
        return self._encode(text) if first or not self._adds_space else self._continue(text)

    def chunk_ids(self, text: str) -> list[int]:
        """Ids of a chunk: always the same for the same text, and never a special or added token."""
        ids: list[int] = []
        for piece in self._pieces(text):
            ids += self._continue(piece, data=True) if self._adds_space else self._encode(piece, data=True)
        return ids

    def __call__(self, prompt: BlendPrompt) -> TokenizedPrompt:
        """The ids of the whole prompt: each segment's, joined."""
        ids = list(self.leading_ids) if prompt.add_special_tokens else []
        spans = []
        for number, part in enumerate(prompt.parts):
            start = len(ids)
            if isinstance(part, Chunk):
                ids += self.chunk_ids(part.text)
                spans.append((start, len(ids)))
            else:
                ids += self.text_ids(part, first=number == 0)
        if prompt.add_special_tokens:
            ids += self.trailing_ids
        return TokenizedPrompt(ids, tuple(spans))

    def prefix_ids(self, prefix: str) -> list[int]:
        """Ids of the text before the first chunk of a prompt that starts with `prefix`, BOS included.

        Text that a chat template rendered carries its own BOS, which is not doubled.
        """
        ids = self.text_ids(prefix, first=True)
        lead = self.leading_ids
        return ids if ids[: len(lead)] == lead else lead + ids

    def _encode(self, text: str, data: bool = False) -> list[int]:
        if not text:
            return []
        with self._lock:
            extra = {"split_special_tokens": True} if data and getattr(self.tokenizer, "is_fast", False) else {}
            return list(self.tokenizer.encode(text, add_special_tokens=False, **extra))

    def _continue(self, text: str, data: bool = False) -> list[int]:
        guard, ids = self._encode(_GUARD, data), self._encode(_GUARD + text, data)
        return ids[len(guard) :] if ids[: len(guard)] == guard else self._encode(text, data)

    def _pieces(self, text: str) -> list[str]:
        """Cuts every control token's spelling after its first character, so that no piece spells one."""
        if self._control is None:
            return [text]
        cuts = [match.start() + 1 for match in self._control.finditer(text)]
        return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
