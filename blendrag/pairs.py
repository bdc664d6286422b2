"""The pair of marks around a document in a text: which sequences they are, writing them and reading them.

Each mark is three private-use characters in a row that no text, icon font or PDF holds by chance.  A document is an
opening mark, its text, and the next closing mark, with no other mark of either kind between them.  Everything else is
text and stays as it is, character by character: a single mark, one of two opening marks, or a part of a mark.
"""

from __future__ import annotations

import re

_FIRST = "\uf4b1"
_HEAD = _FIRST + "\ue8d3"

OPEN = _HEAD + "\uf2a7"
"""Stands before a document."""

CLOSE = _HEAD + "\uf2a8"
"""Stands behind a document."""

LITERAL = _HEAD + "\uf2a9"
"""An escaped U+F4B1, the character that every mark begins with, in a document or in the text around it."""

_MARK = re.compile(f"{OPEN}|{CLOSE}")


def are_in(text: str) -> bool:
    """Whether a text holds marks, or escapes of what could be marks."""
    return _HEAD in text and (_MARK.search(text) is not None or LITERAL in text)


def escape(text: str) -> str:
    """The text in a form that holds no mark, wherever it is put."""
    return text.replace(_FIRST, LITERAL)


def mark(text: str) -> str:
    """The text as one document."""
    return f"{OPEN}{escape(text)}{CLOSE}"


def cut(text: str) -> list[tuple[str, bool]]:
    """The pieces of a text, in order, without marks and escapes, and whether each is a document."""
    pieces = []
    end = 0  # of the last document
    start = -1  # of the document that is open
    for found in _MARK.finditer(text):
        if found[0] == OPEN:
            start = found.end()
        elif start >= 0:
            pieces += [(text[end:start - len(OPEN)], False), (text[start:found.start()], True)]
            end, start = found.end(), -1
    pieces.append((text[end:], False))
    return [(piece.replace(LITERAL, _FIRST), document) for piece, document in pieces]
