"""The demo's prompts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from blendrag.evaluate.prompts import as_chat
from blendrag.prompt import BlendPrompt, Chunk, mark_chunks


def build_prompt(tokenizer: Any, question: str, chunks: Sequence[Chunk]) -> BlendPrompt:
    """Chunks, then the question, in the model's chat template where it has one.

    The text before the first chunk is the same for every question, so that chunks can be encoded behind it.
    """
    passages = mark_chunks(chunk.text for chunk in chunks)
    request = f"Answer the question from these passages.\n\n{passages}\n\nQuestion: {question}"
    return as_chat(tokenizer, request, "\nAnswer:")


def cut_elsewhere(prompt: BlendPrompt) -> BlendPrompt:
    """The same text with every chunk one character longer: chunks of which none is stored."""
    parts = list(prompt.parts)
    for number, (part, following) in enumerate(pairwise(prompt.parts)):
        if isinstance(part, Chunk) and isinstance(following, str):
            parts[number], parts[number + 1] = Chunk(part.text + following[0]), following[1:]
    return BlendPrompt(*parts, add_special_tokens=prompt.add_special_tokens)
