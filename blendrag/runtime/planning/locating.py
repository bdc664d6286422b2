"""Finds in a prompt's tokens the documents that a request names by their text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from blendrag.tokens import SegmentTokenizer

if TYPE_CHECKING:
    import numpy.typing as npt

Span = tuple[int, int]

_EDGE = 8
"""Tokens at either end of a document that BPE may have merged with what stands beside it."""
_REMEMBERED = 2048
"""Documents whose tokens are kept: popular ones come again, and this is done on the scheduler's thread."""


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
        self._ids = lru_cache(_REMEMBERED)(self._encode)

    def __call__(self, texts: Any) -> Iterator[npt.NDArray[np.int64]]:
        """Ids of each text, int64.

        Args:
            texts: what a client sent.

        Raises:
            TypeError: something else than texts, where it is met.
            PromptError: a text that is none, half of a surrogate pair for instance.
        """
        if not isinstance(texts, list):
            raise TypeError(f"documents are a list of texts, not {type(texts).__name__}")
        for text in texts:
            if not isinstance(text, str):
                raise TypeError(f"a document is a text, not {type(text).__name__}")
            yield self._ids(text)

    def _encode(self, text: str) -> npt.NDArray[np.int64]:
        return np.array(self._tokens.text_ids(text) if self._tokens else [], np.int64)


def locate(prompt: npt.NDArray[np.int64], documents: Iterable[npt.NDArray[np.int64]],
           taken: Iterable[Span] = ()) -> tuple[list[Marked], list[int]]:
    """Where documents stand in a prompt: each once, none inside of another one or of what is `taken`.

    Beside a document BPE may have merged its first or last tokens with other text, so only its interior has to be
    there; from there on it extends to both sides as far as the tokens are equal.

    Args:
        prompt, documents: token ids.

    Returns:
        What was found, and the lengths of the documents that were not.
    """
    searched = prompt.astype(np.int32).tobytes()
    occupied = np.zeros(len(prompt), bool)
    for start, end in taken:
        occupied[start:end] = True
    found: list[Marked] = []
    lost: list[int] = []
    for ids in sorted(documents, key=len, reverse=True):  # a short one may also stand inside of a long one
        place = next((place for place in _places(prompt, searched, ids) if not occupied[place.start:place.end].any()),
                     None)
        if place is None:
            lost.append(len(ids))
        else:
            occupied[place.start : place.end] = True
            found.append(place)
    return sorted(found, key=lambda place: place.start), lost


def _places(prompt: npt.NDArray[np.int64], searched: bytes, ids: npt.NDArray[np.int64]) -> Iterator[Marked]:
    """Each place of one document, from the left."""
    edge = min(_EDGE, len(ids) // 4)
    inside = ids[edge : len(ids) - edge].astype(np.int32).tobytes()
    at = searched.find(inside) if inside else -1
    while at >= 0:
        if at % 4:  # across the borders of tokens
            at = searched.find(inside, at + 1)
            continue
        first = at // 4
        before = min(edge, first)
        left = _equal(prompt[first - before : first][::-1], ids[edge - before : edge][::-1])
        end = first + len(inside) // 4
        right = _equal(prompt[end : end + edge], ids[len(ids) - edge :])
        yield Marked(first - left, end + right, ids, edge - left)
        at = searched.find(inside, at + 4)


def _equal(some: npt.NDArray[np.int64], others: npt.NDArray[np.int64]) -> int:
    """How many of the first tokens are the same."""
    length = min(len(some), len(others))
    return int(np.append(some[:length] != others[:length], True).argmax())
