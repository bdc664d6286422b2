"""The texts of a load: prompts of its requests, of the streams beside them and of the probes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blendrag.bench.load.workload import Request
from blendrag.bench.texts import Vocabulary
from blendrag.errors import DatasetError
from blendrag.prompt import BlendPrompt, Chunk

_SHORT_TOKENS = 16
_BETWEEN = "\n\n"


@dataclass(frozen=True)
class Lengths:
    """Lengths of texts in tokens.

    Attributes:
        answer: of the answers in the history of a conversation, and of what is generated.
    """

    document: int = 128
    system: int = 64
    question: int = 24
    answer: int = 16


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation: the documents that were retrieved for it, the question and the answer."""

    documents: Sequence[str]
    question: str
    answer: str = ""


class Prompts:
    """Makes prompts.  Answers in the history of a conversation are made up, so that all arms send the same prompts.

    Args:
        vocabulary: where texts come from.
        real: documents to use instead; empty for made-up ones.
        series: new documents of a load (beyond its pool) are others in each series.

    Attributes:
        prefix: the system prompt, with which all prompts but the short ones begin.
    """

    def __init__(self, vocabulary: Vocabulary, lengths: Lengths, pool: int, real: Sequence[str] = (),
                 series: int = 0) -> None:
        self._vocabulary = vocabulary
        self._lengths = lengths
        self._pool = pool
        self._real = real
        self._series = series
        self.prefix = vocabulary.text("system", lengths.system) + _BETWEEN

    def document(self, number: int) -> str:
        """A document; DatasetError where there are too few real ones."""
        if not self._real:
            series = "" if number < self._pool else f"{self._series} "
            return self._vocabulary.text(f"document {series}{number}", self._lengths.document)
        if number >= len(self._real):
            raise DatasetError(f"the load needs more than the {len(self._real)} documents of the data: make the pool "
                               "smaller or requests fewer, or leave --data out")
        return self._real[number]

    def turn(self, conversation: int, number: int, documents: Sequence[int]) -> Turn:
        """A turn with its texts."""
        name = f"{conversation} {number}"
        return Turn([self.document(document) for document in documents],
                    self._vocabulary.text(f"question {name}", self._lengths.question),
                    self._vocabulary.text(f"answer {name}", self._lengths.answer))

    def conversation(self, turns: Sequence[Turn]) -> BlendPrompt:
        """The prompt of the last turn; the earlier ones stand before it with their documents and answers."""
        parts: list[str | Chunk] = [self.prefix]
        for turn in turns:
            for document in turn.documents:
                parts += [Chunk(document), _BETWEEN]
            parts.append(turn.question)
            if turn is not turns[-1]:
                parts += [_BETWEEN, turn.answer, _BETWEEN]
        return BlendPrompt(*parts)

    def requests(self, requests: Sequence[Request]) -> list[BlendPrompt]:
        """The prompt of each request; of earlier turns it holds the questions and answers, not the documents."""
        history: dict[int, list[Turn]] = {}
        prompts = []
        for request in requests:
            turns = history.setdefault(request.conversation, [])
            turn = self.turn(request.conversation, request.turn, request.documents)
            prompts.append(self.conversation([*turns, turn]))
            turns.append(Turn((), turn.question, turn.answer))
        return prompts

    def short(self, name: str) -> BlendPrompt:
        """A prompt without documents, of 16 tokens."""
        return BlendPrompt(self._vocabulary.text(name, _SHORT_TOKENS))
