"""Prompts that know where their chunks begin and end."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from blendrag import delimiters, pairs
from blendrag.config import DELIMITER
from blendrag.errors import PromptError

__all__ = ["DELIMITER", "BlendPrompt", "Chunk", "escape_marks", "mark_chunks", "strip_marks"]

@dataclass(frozen=True)
class Chunk:
    """A piece of a document, whose KV may be stored and reused.

    Its text is data: it is tokenised on its own and never becomes a special token or a mark.
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
    def from_text(cls, text: str, delimiter: str | None = None, *, keep_delimiter: bool = False,
                  add_special_tokens: bool = True) -> BlendPrompt:
        """Reads the marks that `mark_chunks` put into a text: each document between a pair of them is a chunk.

        What is no pair stays text, character by character.  A document of white space alone is no chunk, and neither
        is anything in text without marks.

        Args:
            delimiter: None for pairs of marks.  A delimiter is read as LMCache does: what lies between two of
                them is a chunk, the text before the first and after the last never is.
            keep_delimiter: leave the delimiters in the prompt, as LMCache does; pairs are always removed.
        """
        if delimiter is None:
            pieces = pairs.cut(text)
        else:
            delimiters.check(delimiter)
            pieces = delimiters.cut(text, delimiter, keep_delimiter)
        return cls(*(Chunk(piece) if document and piece.strip() else piece for piece, document in pieces),
                   add_special_tokens=add_special_tokens)

    def marking(self, texts: Iterable[str]) -> BlendPrompt:
        """The same prompt, in which these texts are chunks wherever its text holds them, the longest first.

        White space at a text's ends belongs to the chunk where the prompt has it, too.  Texts that the prompt does not
        hold, character by character, change nothing.
        """
        anywhere = _finder(texts, self.text)
        if anywhere is None:
            return self
        parts: list[str | Chunk] = []
        for part in self.parts:
            if isinstance(part, Chunk):
                parts.append(part)
            else:
                # Splitting at a group gives, in turn, what lies between the texts and each of them.
                parts += [Chunk(piece) if number % 2 else piece for number, piece in enumerate(anywhere.split(part))]
        return BlendPrompt(*parts, add_special_tokens=self.add_special_tokens)

    def to_text(self) -> str:
        """The prompt as one string with pairs of marks, from which `from_text` recovers its parts."""
        return "".join(pairs.mark(part.text) if isinstance(part, Chunk) else pairs.escape(part) for part in self.parts)

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


def mark_chunks(texts: Iterable[str], delimiter: str | None = None, separator: str = "\n\n") -> str:
    """Joins chunk texts into one string from which `BlendPrompt.from_text` recovers each of them.

    Without the marks, the result is `separator.join(texts)`.  A text that holds a mark itself is escaped, and comes
    back unchanged.  The separator is ordinary text between the chunks.

    Args:
        delimiter: None for a pair of marks around each text, or the delimiter that the engine is configured with.
    """
    if isinstance(texts, str):
        raise PromptError("mark_chunks takes a list of texts, not one text: pass [text]")
    if delimiter is None:
        return pairs.escape(separator).join(map(pairs.mark, texts))
    delimiters.check(delimiter)
    return delimiters.mark(list(texts), delimiter, separator)


def escape_marks(text: str, delimiter: str | None = None) -> str:
    """Text to stand around marked chunks: a mark in it begins and ends nothing, and comes back unchanged."""
    if delimiter is None:
        return pairs.escape(text)
    delimiters.check(delimiter)
    return delimiters.escape(text, delimiter)


def strip_marks(text: str, delimiter: str | None = None) -> str:
    """The text without marks, for a model that does not blend."""
    return BlendPrompt.from_text(text, delimiter).text


def _text(part: str | Chunk) -> str:
    return part.text if isinstance(part, Chunk) else part


def _finder(texts: Iterable[str], within: str) -> re.Pattern[str] | None:
    """What finds those of the texts that stand in a text, with the white space at their ends; None without any."""
    cores = {text.strip(): text for text in texts}
    present = sorted((core for core in cores if core and core in within), key=len, reverse=True)
    if not present:
        return None
    return re.compile(f"({'|'.join(_pattern(cores[core], core) for core in present)})")


def _pattern(text: str, core: str) -> str:
    before, after = text.split(core, 1)
    return f"(?:{re.escape(before)})?{re.escape(core)}(?:{re.escape(after)})?"
