"""Finds in a prompt's tokens the documents that a request names by their text."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from blendrag.occurrences import find_occurrences
from blendrag.store.windows import prompt_ids
from blendrag.tokens import SegmentTokenizer

if TYPE_CHECKING:
    import numpy.typing as npt

Span = tuple[int, int]

_EDGE = 8
"""Tokens at either end of a document that BPE may have merged with what stands beside it."""
_MAX_ID = 2**31 - 1
_TAKEN = 2**32 - 1
"""Takes the place of tokens that belong to a document already: no document has it."""
_SCANS = 64
"""What looking for further places of documents may cost, in looks at the whole prompt."""


@dataclass(frozen=True)
class Marked:
    """A chunk that a request marks.

    Attributes:
        start, end: where it stands in the prompt, without what the tokenizer merged with its neighbours.
        ids: the whole chunk, as it is stored; int64.
        offset: its token that stands at `start`.
    """

    start: int
    end: int
    ids: npt.NDArray[np.int64]
    offset: int = 0


class DocumentTokens:
    """Tokens of documents as they are in a prompt that was tokenised in one go.

    They are those of `BlendEngine.encode`, but that a control token's spelling is the control token here.

    Args:
        tokens: the model's; None where the engine runs without a tokenizer.
    """

    def __init__(self, tokens: SegmentTokenizer | None) -> None:
        self._tokens = tokens
        self._lengths = _token_lengths(tokens.tokenizer.get_vocab() if tokens else {})

    def __call__(self, texts: Any, prompt: Sequence[int]) -> Iterator[npt.NDArray[np.int64]]:
        """Ids of each text, int64.

        This runs on the scheduler's thread: texts that are too long to be in the prompt, alone or together, are not
        tokenised, and have no ids.

        Args:
            texts: what a client sent.
            prompt: token ids.

        Raises:
            TypeError: something else than texts, where it is met.
            PromptError: a text that is none, half of a surrogate pair for instance.
        """
        if not isinstance(texts, list):
            raise TypeError(f"documents are a list of texts, not {type(texts).__name__}")
        if not texts:
            return
        # The tokenizer may compose characters, and a document's edges may be other tokens than in the prompt.
        characters = int(self._lengths.take(prompt_ids(prompt), mode="clip").sum())
        longest = 2 * characters + 2 * _EDGE * int(self._lengths.max())
        room = 2 * longest
        for text in texts:
            if not isinstance(text, str):
                raise TypeError(f"a document is a text, not {type(text).__name__}")
            if len(text) <= min(longest, room):
                room -= len(text)
                yield self._tokens.text_array(text) if self._tokens else np.zeros(0, np.int64)
            else:
                yield np.zeros(0, np.int64)


def as_ids(ids: list[int]) -> npt.NDArray[np.int64]:
    """A document whose token ids are known, as `locate` takes it."""
    return np.frombuffer(array("I", ids), np.uint32).astype(np.int64)  # half of what numpy takes for a list


def locate(prompt: npt.NDArray[np.int64], documents: Iterable[npt.NDArray[np.int64]],
           taken: Iterable[Span] = ()) -> tuple[list[Marked], list[int]]:
    """Where documents stand in a prompt: each once, none inside of another one or of what is `taken`.

    Beside a document BPE may have merged its first or last tokens with other text, so only its interior has to be
    there; from there on it extends to both sides as far as the tokens are equal.  Longer documents come first.

    The work is near-linear in the tokens of prompt and documents.  Only where very many documents are equal, or stand
    inside of others, some of those that are there are not found.

    Args:
        prompt, documents: token ids.

    Returns:
        What was found, and the lengths of the documents that were not.
    """
    documents = sorted(documents, key=len, reverse=True)  # a short one may also stand inside of a long one
    if not documents:
        return [], []
    search = _Search(prompt)
    for start, end in taken:
        search.take(start, end)
    possible: list[npt.NDArray[np.int64]] = []
    lost: list[int] = []
    for ids in documents:
        # A negative number is a huge one without its sign.
        fits = 0 < len(ids) <= len(prompt) + 2 * _EDGE and ids.view(np.uint64).max() <= _MAX_ID
        if fits:
            possible.append(ids)
        else:
            lost.append(len(ids))
    whole = [ids.astype(np.uint32) for ids in possible]
    inner = [tokens[_edge(tokens) : len(tokens) - _edge(tokens)] for tokens in whole]
    located: list[Marked] = []
    for ids, tokens, inside, first in zip(possible, whole, inner, find_occurrences(search.free, inner), strict=True):
        at = search.find(inside, first)
        if at < 0:
            lost.append(len(ids))
            continue
        start = at - _edge(ids)
        located.append(Marked(start, start + len(ids), ids) if search.holds(tokens, start)
                       else _extended(search.free, ids, at))
        search.take(located[-1].start, located[-1].end)
    return sorted(located, key=lambda place: place.start), lost


class _Search:
    """A prompt in which ever more tokens are taken.

    Attributes:
        free: uint32, the prompt; `_TAKEN` where a token is.
    """

    def __init__(self, prompt: npt.NDArray[np.int64]) -> None:
        self._bytes = bytearray(prompt_ids(prompt).tobytes())
        self.free = np.frombuffer(self._bytes, np.uint32)
        self._work = _SCANS * len(self._bytes)
        self._resume: dict[bytes, int] = {}

    def take(self, start: int, end: int) -> None:
        """Makes a place unavailable."""
        self.free[start:end] = _TAKEN

    def holds(self, tokens: npt.NDArray[np.uint32], start: int) -> bool:
        """Whether tokens are free at a place."""
        return start >= 0 and self._bytes.startswith(tokens.tobytes(), 4 * start)

    def find(self, tokens: npt.NDArray[np.uint32], first: int) -> int:
        """Where tokens are free now; -1 where they are not, or where further search would cost too much.

        Args:
            first: their first place when nothing was taken, or -1.
        """
        if first < 0 or self.holds(tokens, first):
            return first
        content = tokens.tobytes()
        at = self._resume.get(content, 4 * first)  # what was taken before stays taken
        while self._work > 0:
            start, at = at, self._bytes.find(content, at)
            self._work -= (at if at >= 0 else len(self._bytes)) - start + len(content)
            if at < 0 or at % 4 == 0:
                self._resume[content] = at if at >= 0 else len(self._bytes)
                return at // 4
            at += 1  # across the borders of tokens
        return -1


def _extended(free: npt.NDArray[np.uint32], ids: npt.NDArray[np.int64], at: int) -> Marked:
    """A document whose interior is at a place, with the tokens beside it that are the document's, too."""
    edge = _edge(ids)
    before = min(edge, at)
    left = _equal(free[at - before : at][::-1], ids[edge - before : edge][::-1])
    end = at + len(ids) - 2 * edge
    right = _equal(free[end : end + edge], ids[len(ids) - edge :])
    return Marked(at - left, end + right, ids, edge - left)


def _edge(ids: npt.NDArray[Any]) -> int:
    return min(_EDGE, len(ids) // 4)


def _equal(some: npt.NDArray[Any], others: npt.NDArray[Any]) -> int:
    """How many of the first tokens are the same."""
    length = min(len(some), len(others))
    return int(np.append(some[:length] != others[:length], True).argmax())


def _token_lengths(vocabulary: dict[str, int]) -> npt.NDArray[np.int64]:
    """Characters that each token stands for at most, by its id; the last one is 0, for all other numbers."""
    lengths = np.zeros(max(vocabulary.values(), default=0) + 2, np.int64)
    lengths[list(vocabulary.values())] = list(map(len, vocabulary))
    return lengths
