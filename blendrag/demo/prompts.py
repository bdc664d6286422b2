"""The demo's prompts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from blendrag.evaluate.prompts import as_chat
from blendrag.prompt import BlendPrompt, Chunk, escape_marks, mark_chunks

_SPACE = re.compile(r"(\s+)")
_LONGEST_WORD = 100


def build_prompt(tokenizer: Any, question: str, chunks: Sequence[Chunk]) -> BlendPrompt:
    """Chunks, then the question, in the model's chat template where it has one.

    The text before the first chunk is the same for every question, so that chunks can be encoded behind it.
    """
    passages = mark_chunks(chunk.text for chunk in chunks)
    request = f"Answer the question from these passages.\n\n{passages}\n\nQuestion: {escape_marks(question)}"
    return as_chat(tokenizer, request, "\nAnswer:")


def scrambled(prompt: BlendPrompt) -> BlendPrompt:
    """The same words in another order within each chunk: chunks of which not even a part is stored."""
    parts = [Chunk(_backwards(part.text)) if isinstance(part, Chunk) else part for part in prompt.parts]
    return BlendPrompt(*parts, add_special_tokens=prompt.add_special_tokens)


def _backwards(text: str) -> str:
    pieces = _SPACE.split(text)  # words, and what is between them, in turns
    if sum(len(piece) for piece in pieces if len(piece) > _LONGEST_WORD) > len(text) / 2:  # a script without spaces
        return text[::-1]
    pieces[::2] = pieces[::2][::-1]
    return "".join(pieces)
