"""Texts of a given length, made of words of a model's own vocabulary."""

from __future__ import annotations

import random

from blendrag.tokens import SegmentTokenizer

_FIRST_ID, _LAST_ID = 1000, 40_000
"""Below are single bytes and control tokens in most vocabularies, above are rare words and other scripts."""


class Vocabulary:
    """Random texts; the same name and length give the same text, whatever was made before.

    Args:
        tokens: the model's tokenizer.
        seed: other seeds give other texts.
    """

    def __init__(self, tokens: SegmentTokenizer, seed: int = 0) -> None:
        self.tokens = tokens
        self._seed = seed

    def text(self, name: str, length: int) -> str:
        """A text of about `length` tokens.

        Args:
            name: what the text is; different names give different texts.
        """
        source = random.Random(f"{self._seed} {name}")
        tokenizer = self.tokens.tokenizer
        last = min(len(tokenizer), _LAST_ID)
        ids = [source.randrange(min(_FIRST_ID, last // 2), last) for _ in range(length)]
        text: str = tokenizer.decode(ids, skip_special_tokens=True)
        while len(exact := self.tokens.chunk_ids(text)) > length:
            text = tokenizer.decode(exact[:length])
            if len(self.tokens.chunk_ids(text)) >= len(exact):
                break
        return text
