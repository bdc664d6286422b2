"""Cuts documents into chunks of at most so many tokens, at the best border there is."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from blendrag.documents.read import Source
from blendrag.errors import DocumentError
from blendrag.prompt import Chunk

MIN_CHUNK_TOKENS = 16

_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})[^\n]*\n(?:.*?^ {0,3}\1[`~]*[ \t]*$|.*\Z)", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^ {0,3}#{1,6}[ \t]+(?P<hash>[^\n]*)$"
                      r"|^(?P<line>[^\s>|#-][^\n]*)\n(?:=+|-{2,})[ \t]*$", re.MULTILINE)
_PARAGRAPH = re.compile(r"\n(?:[ \t]*\n)+")
_ITEM = re.compile(r"\n(?=[ \t]*(?:[-*+]|\d+[.)]|\|)[ \t])")  # list items and table rows
_LINE = re.compile(r"\n")
_SENTENCE = re.compile(r"[.!?…][\"'”’»)\]]*\s+|[。！？]")
_WORD = re.compile(r"\s+")
_BLANK_LINES = re.compile(r"(?:[^\S\n]*\n)*")


@dataclass(frozen=True)
class DocumentChunk(Chunk):
    """A chunk that knows where it comes from.

    Attributes:
        source: path of the document, `Source.path`.
        heading: the heading it stands under; empty where there is none.
        tokens: its length, as `count` measured it.
    """

    source: str
    heading: str
    tokens: int


def split(source: Source, count: Callable[[str], int], chunk_tokens: int = 256) -> list[DocumentChunk]:
    """Splits a document into chunks, in order and without overlap; only white space between them is lost.

    A chunk ends before a heading where one lies in its second half; else at the end of a paragraph, a list
    item, a sentence, a line, a word, in this order.  A heading is never parted from what follows it; fenced code is
    cut at lines.

    Args:
        count: how many tokens the model makes of a text, for instance
            `lambda text: len(engine.tokens.chunk_ids(text))`.
        chunk_tokens: most tokens of a chunk, at least 16.

    Raises:
        DocumentError: `chunk_tokens` is too small.
    """
    if chunk_tokens < MIN_CHUNK_TOKENS:
        raise DocumentError(f"chunks of {chunk_tokens} tokens are too small: choose {MIN_CHUNK_TOKENS} or more")
    text = source.text
    borders = _Borders(text)
    chunks = []
    start = _skip_space(text, 0)
    while start < len(text):
        end = _end(text, start, borders, count, chunk_tokens)
        piece = text[start:end].rstrip()
        chunks.append(DocumentChunk(piece, source.path, borders.heading_at(start), count(piece)))
        start = _skip_space(text, end)
    return chunks


class _Borders:
    """Positions at which a text may be cut, best kind first; each is where the next piece starts."""

    def __init__(self, text: str) -> None:
        fences = [match.span() for match in _FENCE.finditer(text)]

        def outside(position: int) -> bool:
            number = bisect_right(fences, (position, len(text))) - 1
            return number < 0 or position >= fences[number][1] or position == fences[number][0]

        found = [match for match in _HEADING.finditer(text) if outside(match.start())]
        self._headings = [(match.start(), (match["hash"] or match["line"] or "").strip(" \t#")) for match in found]
        # Nothing is cut between a heading and the line that follows it.
        glued = [(match.start(), _skip_space(text, match.end())) for match in found]

        def allowed(position: int) -> bool:
            number = bisect_left(glued, (position, 0)) - 1
            return not (number >= 0 and glued[number][0] < position <= glued[number][1])

        starts = [start for start, _ in self._headings]
        # A run of headings is cut before its first one only.
        self._kinds: list[list[int]] = [[start for start in starts if allowed(start)]]
        for pattern, in_code in ((_PARAGRAPH, False), (_ITEM, False), (_SENTENCE, False), (_LINE, True),
                                 (_WORD, True)):
            ends = [match.end() for match in pattern.finditer(text)]
            self._kinds.append([end for end in ends if allowed(end) and (in_code or outside(end))])

    def heading_at(self, position: int) -> str:
        """The last heading that starts at or before a position."""
        number = bisect_right(self._headings, position, key=lambda heading: heading[0]) - 1
        return self._headings[number][1] if number >= 0 else ""

    def before(self, low: int, high: int) -> Iterator[int]:
        """Borders in `(low, high]`, best kind first, the last ones of each kind first."""
        for kind in self._kinds:
            yield from reversed(kind[bisect_right(kind, low) : bisect_right(kind, high)])


def _end(text: str, start: int, borders: _Borders, count: Callable[[str], int], budget: int) -> int:
    """Where the chunk that starts at `start` ends."""
    most = _reach(text, start, count, budget)
    if most == len(text):
        return most
    # What is left for the last chunk should not be tiny.
    most = min(most, len(text) - (most - start) // 4)
    # Nor should this one be: its first half is no place for an end, unless there is no other.
    middle = start + (most - start) // 2
    for low in (middle, start):
        for border in borders.before(low, most):
            # A shorter text can, rarely, have a few tokens more.
            if count(text[start:border].rstrip()) <= budget:
                return border
    return most


def _reach(text: str, start: int, count: Callable[[str], int], budget: int) -> int:
    """The farthest end of a piece that starts at `start` and keeps the budget; at least one character."""

    def fits(end: int) -> bool:
        return count(text[start:end].rstrip()) <= budget

    low, high = start + 1, min(len(text), start + 5 * budget)
    while fits(high):
        if high == len(text):
            return high
        low, high = high, min(len(text), start + 2 * (high - start))
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def _skip_space(text: str, position: int) -> int:
    """Where the next piece starts: past blank lines, but a line keeps its indentation."""
    match = _BLANK_LINES.match(text, position)
    position = match.end() if match else position
    if not position or text[position - 1] == "\n":
        return position if text[position:].strip() else len(text)
    while position < len(text) and text[position].isspace():
        position += 1
    return position
