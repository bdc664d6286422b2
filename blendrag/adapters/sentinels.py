"""Where a chat template puts the documents of its messages: found by a second rendering, with sentinels around them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from blendrag.prompt import BlendPrompt, Chunk

_HEAD = "\uf4b1\ue8d3"
_FILL = "\uf2aa"
_START, _END = "\uf2ab", "\uf2ac"


class Span(NamedTuple):
    """A document's place in a rendered text, without the white space at the document's ends.

    Attributes:
        document: its number, in the order of `Sentinels.documents`.
        start: its first character.
        end: behind its last one.
    """

    document: int
    start: int
    end: int


@dataclass
class Sentinels:
    """Puts sentinels into texts and finds them again.

    Attributes:
        text: the rendering without sentinels.
        documents: of all texts that sentinels were put into, in order.
    """

    text: str
    documents: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._key = _HEAD + _FILL
        while self._key in self.text:
            self._key += _FILL
        self._any = re.compile(f"{self._key}([0-9]+)([{_START}{_END}])")

    def put(self, prompt: BlendPrompt) -> str:
        """The prompt's text, with sentinels around each chunk, inside of the white space at its ends."""
        pieces = []
        for part in prompt.parts:
            if isinstance(part, Chunk):
                before, core, after = cut_space(part.text)
                key = f"{self._key}{len(self.documents)}"
                pieces.append(f"{before}{key}{_START}{core}{key}{_END}{after}")
                self.documents.append(part.text)
            else:
                pieces.append(part)
        return "".join(pieces)

    def spans(self, rendered: str) -> tuple[list[Span], set[int]] | None:
        """Where the documents stand in `text`, and the numbers of those of which only a part stands there.

        Documents that the template left out are in neither.

        Args:
            rendered: the rendering with sentinels; without them it must be `text`.

        Returns:
            None where it is not: the template looks at what documents hold, and writes another text for sentinels.
        """
        if self._any.sub("", rendered) != self.text:
            return None
        spans: list[Span] = []
        seen: set[int] = set()
        opened: tuple[int, int] | None = None
        removed = 0  # characters of sentinels so far
        for found in self._any.finditer(rendered):
            document, place = int(found[1]), found.start() - removed
            removed += len(found[0])
            seen.add(document)
            if found[2] == _START:
                opened = document, place
            elif opened is not None and opened[0] == document:
                spans.append(Span(document, opened[1], place))
                opened = None
        return spans, seen - {span.document for span in spans}

    def search(self) -> tuple[list[Span], set[int]]:
        """Where each document's text stands in `text`, in order, and the numbers of those that cannot be told.

        A document is told by its text only where the rendering holds it as often as the messages do.
        """
        cores = [cut_space(document)[1] for document in self.documents]
        spans: list[Span] = []
        lost: set[int] = set()
        end = 0
        for number, core in enumerate(cores):
            start = self.text.find(core, end) if self.text.count(core) == cores.count(core) else -1
            if start < 0:
                lost.add(number)
            else:
                end = start + len(core)
                spans.append(Span(number, start, end))
        return spans, lost

    def prompt(self, spans: list[Span]) -> BlendPrompt:
        """`text` with the documents of these spans as chunks.

        White space at a document's ends belongs to the chunk where `text` has it: its tokens are those of the stored
        document then.
        """
        parts: list[str | Chunk] = []
        done = 0
        behind = [*(span.start for span in spans), len(self.text)][1:]
        for span, following in zip(spans, behind, strict=True):
            before, _, after = cut_space(self.documents[span.document])
            start, end = span.start - len(before), span.end + len(after)
            if start < done or not self.text.startswith(before, start):
                start = span.start
            if end > following or not self.text.startswith(after, span.end):
                end = span.end
            parts += [self.text[done:start], Chunk(self.text[start:end])]
            done = end
        return BlendPrompt(*parts, self.text[done:], add_special_tokens=False)


def cut_space(text: str) -> tuple[str, str, str]:
    """White space at a text's beginning, the text between, and white space at its end."""
    core = text.strip()
    before, after = text.split(core, 1) if core else (text, "")
    return before, core, after
