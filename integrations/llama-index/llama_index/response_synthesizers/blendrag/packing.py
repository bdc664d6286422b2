"""What a prompt helper hands to LlamaIndex: strings and lists of strings that know a little more."""

from __future__ import annotations

from collections.abc import Iterable

from blendrag import mark_chunks

SEPARATOR = "\n\n"
"""What LlamaIndex puts between chunks."""


class PackedText(str):
    """Chunks joined and marked for the engine.

    A synthesizer hands this string to a prompt template, or back to the prompt helper, which then finds the chunks
    again.  A document cannot pass for one, whatever characters it holds.

    Attributes:
        chunks: the chunks as they were.
    """

    chunks: tuple[str, ...]

    def __new__(cls, chunks: Iterable[str], delimiter: str | None) -> PackedText:
        """Joins and marks them."""
        whole = tuple(chunks)
        packed = super().__new__(cls, mark_chunks(whole, delimiter, SEPARATOR))
        packed.chunks = whole
        return packed


class TextList(list[str]):
    """Texts that a template shows as text, where a list's brackets and escapes would show otherwise."""

    def __str__(self) -> str:
        return "\n".join(self)
