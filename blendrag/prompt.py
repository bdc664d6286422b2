"""Prompts that know where their chunks begin and end."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from blendrag.config import DELIMITER
from blendrag.errors import PromptError

_ESCAPE = "\ue001"
_ESCAPES = {"0": _ESCAPE, "2": "", "3": ""}  # and "1": the delimiter
_NO_CHUNK = _ESCAPE + "3"  # begins a piece between two delimiters that is ordinary text


@dataclass(frozen=True)
class Chunk:
    """A piece of a document, whose KV may be stored and reused.

    Its text is data: it is tokenised on its own and never becomes a special token or a delimiter.
    """

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise PromptError(f"a chunk's text is a str, not {type(self.text).__name__}: pass the document's text")


@dataclass(frozen=True, init=False)
class BlendPrompt:
    """A prompt made of text and chunks.

    >>> prompt = BlendPrompt("Answer from these passages.\\n", Chunk("Paris is ..."), "\\nWhere is Paris?")
    >>> prompt.prefix
    'Answer from these passages.\\n'

    Attributes:
        parts: text (`str`) and `Chunk`s, in order.
        add_special_tokens: let the tokenizer put its own tokens (BOS) around the prompt; False for
            text that a chat template rendered, which has them already.
    """

    parts: tuple[str | Chunk, ...]
    add_special_tokens: bool

    def __init__(self, *parts: str | Chunk, add_special_tokens: bool = True) -> None:
        for part in parts:
            if not isinstance(part, (str, Chunk)):
                raise PromptError(f"a prompt is made of str and Chunk, not {type(part).__name__}: wrap text in Chunk()")
        joined: list[str | Chunk] = []
        for part in filter(_text, parts):
            if joined and isinstance(part, str) and isinstance(joined[-1], str):
                joined[-1] += part  # one text, however it was put together, has one tokenisation
            else:
                joined.append(part)
        object.__setattr__(self, "parts", tuple(joined))
        object.__setattr__(self, "add_special_tokens", add_special_tokens)

    @classmethod
    def from_text(cls, text: str, delimiter: str = DELIMITER, *, keep_delimiter: bool = False,
                  add_special_tokens: bool = True) -> BlendPrompt:
        """Cuts text at the delimiter: what lies between two delimiters is a chunk.

        The text before the first and after the last delimiter is never a chunk, nor is white space
        between two delimiters.  Text without delimiters is a prompt without chunks.

        Args:
            keep_delimiter: leave the delimiters in the prompt, as LMCache does; they are removed otherwise.
        """
        _check(delimiter)
        pieces = text.split(delimiter)
        parts: list[str | Chunk] = []
        for number, piece in enumerate(pieces):
            if number and keep_delimiter:
                parts.append(delimiter)
            inside = 0 < number < len(pieces) - 1 and not piece.startswith(_NO_CHUNK)
            plain = _unescape(piece, delimiter)
            parts.append(Chunk(plain) if inside and plain.strip() else plain)
        return cls(*parts, add_special_tokens=add_special_tokens)

    def marking(self, texts: Iterable[str]) -> BlendPrompt:
        """The same prompt, in which these texts are chunks wherever its text holds them, the longest first.

        Texts that it does not hold, character by character, change nothing.
        """
        wanted = sorted({text for text in texts if text.strip()}, key=len, reverse=True)
        if not wanted:
            return self
        anywhere = re.compile(f"({'|'.join(map(re.escape, wanted))})")
        parts: list[str | Chunk] = []
        for part in self.parts:
            if isinstance(part, Chunk):
                parts.append(part)
            else:
                # Splitting at a group gives what lies between and what was found, in turn.
                parts += [Chunk(piece) if number % 2 else piece for number, piece in enumerate(anywhere.split(part))]
        return BlendPrompt(*parts, add_special_tokens=self.add_special_tokens)

    @property
    def text(self) -> str:
        """The whole prompt, as a model without blending would be sent it."""
        return "".join(map(_text, self.parts))

    @property
    def chunks(self) -> list[str]:
        """The text of each chunk, in order."""
        return [part.text for part in self.parts if isinstance(part, Chunk)]

    @property
    def prefix(self) -> str:
        """The text before the first chunk: what chunks are best encoded behind."""
        before = []
        for part in self.parts:
            if isinstance(part, Chunk):
                break
            before.append(part)
        return "".join(before)


def mark_chunks(texts: Iterable[str], delimiter: str = DELIMITER, separator: str = "\n\n") -> str:
    """Joins chunk texts into one string from which `BlendPrompt.from_text` recovers each of them.

    With the delimiters taken out, the result is `separator.join(texts)`.  A text that holds the
    delimiter itself is escaped, and comes back unchanged.  The separator is ordinary text between the chunks.
    """
    _check(delimiter)
    if isinstance(texts, str):
        raise PromptError("mark_chunks takes a list of texts, not one text: pass [text]")
    between = _NO_CHUNK + _escape(separator, delimiter) if separator.strip() or delimiter in separator else separator
    pieces: list[str] = []
    for text in texts:
        pieces += [between if pieces else "", _escape(text, delimiter)]
    if not pieces:
        return ""
    return delimiter + delimiter.join(pieces[1:]) + delimiter


def escape_marks(text: str, delimiter: str = DELIMITER) -> str:
    """Text to stand around marked chunks: a delimiter in it begins and ends nothing, and comes back unchanged."""
    _check(delimiter)
    return _escape(text, delimiter)


def strip_marks(text: str, delimiter: str = DELIMITER) -> str:
    """The text without delimiters, for a model that does not blend."""
    return BlendPrompt.from_text(text, delimiter).text


def as_prompt(prompt: str | BlendPrompt, delimiter: str = DELIMITER, keep_delimiter: bool = False) -> BlendPrompt:
    """A `BlendPrompt` as it is, text cut at the delimiter."""
    if isinstance(prompt, BlendPrompt):
        return prompt
    if not isinstance(prompt, str):
        raise PromptError(f"a prompt is a str or a BlendPrompt, not {type(prompt).__name__}")
    return BlendPrompt.from_text(prompt, delimiter, keep_delimiter=keep_delimiter)


def _check(delimiter: str) -> None:
    """Escapes must neither hold nor complete a delimiter."""
    if not delimiter or _ESCAPE in delimiter or delimiter[0] in "0123":
        raise PromptError(f"{delimiter!r} cannot be a delimiter: use one that is not empty, holds no U+E001 and does "
                          "not start with 0, 1, 2 or 3")


def _text(part: str | Chunk) -> str:
    return part.text if isinstance(part, Chunk) else part


def _escape(text: str, delimiter: str) -> str:
    text = text.replace(_ESCAPE, _ESCAPE + "0").replace(delimiter, _ESCAPE + "1")
    # A text that ends, or starts, like the delimiter would shift the cut: keep the two apart.
    if (text + delimiter).find(delimiter) < len(text):
        text += _ESCAPE + "2"
    if (delimiter + text).rfind(delimiter) > 0:
        text = _ESCAPE + "2" + text
    return text


def _unescape(text: str, delimiter: str) -> str:
    if _ESCAPE not in text:
        return text
    pieces: Sequence[str] = text.split(_ESCAPE)
    plain = [pieces[0]]
    for piece in pieces[1:]:
        known = _ESCAPES | {"1": delimiter}
        plain.append(known[piece[0]] + piece[1:] if piece[:1] in known else _ESCAPE + piece)
    return "".join(plain)
