"""Tokenises a prompt segment by segment, so that a chunk's ids never depend on its neighbours."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blendrag.errors import PromptError
from blendrag.prompt import BlendPrompt, Chunk
from blendrag.token_cache import token_cache_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_GUARDS = ("\n", "|", "a")  # one of them is not joined to what follows it


@dataclass(frozen=True)
class TokenizedPrompt:
    """Token ids, and where the chunks lie in them.

    Attributes:
        ids: the prompt.
        spans: `(start, end)` of each chunk, in order, ends exclusive.
    """

    ids: list[int]
    spans: tuple[tuple[int, int], ...]


def control_tokens(tokenizer: Any) -> dict[int, str]:
    """Ids and spellings of a Hugging Face tokenizer's special and added tokens, which text could spell."""
    # Runs of white space may be added tokens too: those are ordinary text.
    return {number: token.content for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items()
            if token.content.strip()}


def control_token_in(tokenizer: Any, text: str) -> str | None:
    """The first control token that a text would become where it is tokenised as prompt text; None without any."""
    control = control_tokens(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return next((control[number] for number in ids if number in control and number != tokenizer.unk_token_id), None)


class SegmentTokenizer:
    """A Hugging Face tokenizer that encodes text and chunks separately.  Safe to call from several threads.

    Each text is tokenised once: its ids are kept in a cache that all equal tokenizers in this process share.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        # Encoding data flips a switch that all users of a tokenizer share: ours is not theirs.
        self._own = copy.deepcopy(tokenizer)
        self._lock = threading.Lock()
        self._cache = token_cache_of(self._own)
        added = control_tokens(tokenizer)
        control = sorted({*added.values(), *tokenizer.all_special_tokens} - {""}, key=len, reverse=True)
        self._control_ids = set(added) - {tokenizer.unk_token_id}
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
        ids: list[int] = self.text_array(text, first=first).tolist()
        return ids

    def text_array(self, text: str, *, first: bool = False) -> npt.NDArray[np.int64]:
        """`text_ids` as an array, int64 [tokens], which must not be written to."""
        if first or not self._adds_space:
            return self._cache.ids("text", text, self._encode)
        return self._cache.ids("continued text", text, self._continue)

    def chunk_ids(self, text: str) -> list[int]:
        """Ids of a chunk: always the same for the same text, and never a special or added token."""
        ids: list[int] = self._cache.ids("chunk", text, self._encode_chunk).tolist()
        return ids

    def _encode_chunk(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self._pieces(text):
            found = self._data(piece)
            if not self._control_ids.isdisjoint(found):
                # A normalizer spelled a control token: "＜tool_call＞" is "<tool_call>" under NFKC.
                found = [known for letter in piece for known in self._data(letter)]
            ids += found
        return ids

    def _data(self, piece: str) -> list[int]:
        return self._continue(piece, data=True) if self._adds_space else self._encode(piece, data=True)

    def __call__(self, prompt: BlendPrompt) -> TokenizedPrompt:
        """The ids of the whole prompt: each segment's, joined."""
        special, parts = prompt.add_special_tokens, prompt.parts
        ids = list(self.leading_ids) if special and not (parts and isinstance(parts[0], str)) else []
        spans = []
        for number, part in enumerate(parts):
            start = len(ids)
            if isinstance(part, Chunk):
                ids += self.chunk_ids(part.text)
                spans.append((start, len(ids)))
            else:
                ids += self.prefix_ids(part) if special and number == 0 else self.text_ids(part, first=number == 0)
        if special:
            ids += self.trailing_ids
        return TokenizedPrompt(ids, tuple(spans))

    def prefix_ids(self, prefix: str | BlendPrompt) -> list[int]:
        """Ids of the text before the first chunk of a prompt that starts with `prefix`, BOS included.

        Text that a chat template rendered carries its own BOS, which is not doubled; in a `BlendPrompt`
        without special tokens none is added where the template has none.
        """
        text = prefix if isinstance(prefix, str) else prefix.prefix
        ids = self.text_ids(text, first=True)
        lead = self.leading_ids if isinstance(prefix, str) or prefix.add_special_tokens else []
        return ids if ids[: len(lead)] == lead else lead + ids

    def control_token(self, ids: Iterable[int]) -> str | None:
        """The spelling of the first special or added token among token ids; None where all are ordinary text."""
        number = next((number for number in ids if number in self._control_ids), None)
        return None if number is None else str(self.tokenizer.decode([number]))

    @property
    def longest_token(self) -> int:
        """Characters of ordinary text that one token stands for, at the most."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    @property
    def sink_ids(self) -> list[int]:
        """What a chunk is encoded behind where no prefix is known: the tokenizer's leading ids, or end-of-text.

        Attention piles up on a sequence's first token; a chunk that began a sequence would carry such a
        sink into the middle of every prompt.
        """
        return self.leading_ids or [self.tokenizer.eos_token_id or 0]

    def _encode(self, text: str, data: bool = False) -> list[int]:
        if not text:
            return []
        with self._lock:
            extra = {"split_special_tokens": True} if data and getattr(self._own, "is_fast", False) else {}
            try:
                return list(self._own.encode(text, add_special_tokens=False, **extra))
            except TypeError as error:
                raise PromptError("the text holds half of a surrogate pair, which is no character: decode the document "
                                  'with errors="replace"') from error

    def _continue(self, text: str, data: bool = False) -> list[int]:
        for guard in _GUARDS:
            before, ids = self._encode(guard, data), self._encode(guard + text, data)
            if ids[: len(before)] == before:
                return ids[len(before) :]
        return self._encode(text, data)

    def _pieces(self, text: str) -> list[str]:
        """Cuts every control token's spelling after its first character, so that no piece spells one."""
        if self._control is None:
            return [text]
        cuts = [match.start() + 1 for match in self._control.finditer(text)]
        return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
