"""Documents between two delimiters, as in LMCache: writing and reading text with a delimiter that a user configured."""

from __future__ import annotations

from collections.abc import Sequence

from blendrag.errors import PromptError

_ESCAPE = "\ue001"
_ESCAPES = {"0": _ESCAPE, "2": "", "3": ""}  # and "1": the delimiter
_NO_CHUNK = _ESCAPE + "3"  # begins a piece between two delimiters that is ordinary text


def check(delimiter: str) -> None:
    """Raises PromptError for a delimiter that an escape would hold or complete."""
    if not delimiter or _ESCAPE in delimiter or delimiter[0] in "0123":
        raise PromptError(f"{delimiter!r} cannot be a delimiter: use one that is not empty, holds no U+E001 and does "
                          "not start with 0, 1, 2 or 3")


def escape(text: str, delimiter: str) -> str:
    """The text in a form in which it begins and ends nothing, next to delimiters and to other text in that form."""
    text = text.replace(_ESCAPE, _ESCAPE + "0").replace(delimiter, _ESCAPE + "1")
    # A text that ends, or starts, like the delimiter would shift the cut: keep the two apart.
    if (text + delimiter).find(delimiter) < len(text):
        text += _ESCAPE + "2"
    if (delimiter + text).rfind(delimiter) > 0:
        text = _ESCAPE + "2" + text
    return text


def mark(texts: Sequence[str], delimiter: str, separator: str) -> str:
    """The texts as documents, with the separator, which is none, between them; empty without texts."""
    between = _NO_CHUNK + escape(separator, delimiter) if separator.strip() or delimiter in separator else separator
    pieces: list[str] = []
    for text in texts:
        pieces += [between if pieces else "", escape(text, delimiter)]
    return delimiter + delimiter.join(pieces[1:]) + delimiter if pieces else ""


def cut(text: str, delimiter: str, keep: bool = False) -> list[tuple[str, bool]]:
    """The pieces of a text, in order, without escapes, and whether each lies between two delimiters.

    Args:
        keep: the delimiters are pieces, too; they are left out otherwise.
    """
    pieces: list[tuple[str, bool]] = []
    raw = text.split(delimiter)
    for number, piece in enumerate(raw):
        if number and keep:
            pieces.append((delimiter, False))
        inside = 0 < number < len(raw) - 1 and not piece.startswith(_NO_CHUNK)
        pieces.append((_unescape(piece, delimiter), inside))
    return pieces


def _unescape(text: str, delimiter: str) -> str:
    if _ESCAPE not in text:
        return text
    first, *rest = text.split(_ESCAPE)
    meaning = _ESCAPES | {"1": delimiter}
    return first + "".join(meaning[piece[0]] + piece[1:] if piece[:1] in meaning else _ESCAPE + piece for piece in rest)
