"""What a request says about its chunks: spans of tokens, documents, a delimiter in its text, or nothing at all."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

from blendrag.tokens import SegmentTokenizer

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_NEIGHBOURS = ("a", ".", "\n", " a", "7")

MARKS = "blend"
"""Key of `kv_transfer_params` under which a request's marks travel in and its statistics travel out.

In: `{"spans": [[start, end], ...], "documents": [text, ...], "policy": settings, "explain": true}`, all optional, or
False for a plain full prefill.
Out: `BlendStats.to_dict()`.
"""


@dataclass(frozen=True)
class Marks:
    """Spans `[start, end)` of chunks in token ids, policy settings, texts of chunks; all as the client sent them.

    `explain` asks for `BlendStats.map`.
    """

    spans: Any
    policy: Any
    documents: Any = field(default_factory=list)
    explain: bool = False


def marks_of(request: Request, delimiter_ids: Sequence[int]) -> Marks | None:
    """The marks of a request; None for one that shall not be blended.

    Args:
        delimiter_ids: tokens of the delimiter, which stands between chunks in the prompts of clients that send
            text and give neither spans nor documents.
    """
    given = (request.kv_transfer_params or {}).get(MARKS)
    if given is False:
        return None
    said = given if isinstance(given, dict) else {}
    spans, documents = said.get("spans") or [], said.get("documents") or []
    if not spans and not documents:
        spans = delimited(request.prompt_token_ids or [], delimiter_ids)
    return Marks(spans, said.get("policy"), documents, said.get("explain") is True)


def delimiter_in(tokens: SegmentTokenizer, delimiter: str) -> list[int]:
    """The delimiter's tokens in a client's text; empty, with a warning, where they depend on what stands beside it."""
    ids = tokens.text_ids(delimiter)
    for before, after in product(_NEIGHBOURS, repeat=2):
        if not delimited(tokens.text_ids(f"{before}{delimiter}{after} {before}{delimiter}{after}"), ids):
            logger.warning("the delimiter %r is not the same tokens wherever it stands (%r, %r): chunks that it marks "
                           "in text are not seen; use the default delimiter, or spans", delimiter, before, after)
            return []
    return ids


def delimited(ids: Sequence[int], delimiter_ids: Sequence[int]) -> list[tuple[int, int]]:
    """What lies between two delimiters in token ids; nothing before the first or behind the last is a chunk."""
    if not delimiter_ids:
        return []
    size = len(delimiter_ids)
    places: list[int] = []
    at = _index(ids, delimiter_ids[0], 0)
    while at >= 0:
        found = list(ids[at : at + size]) == list(delimiter_ids)
        if found:
            places.append(at)
        at = _index(ids, delimiter_ids[0], at + size if found else at + 1)
    return [(start + size, end) for start, end in pairwise(places) if start + size < end]


def _index(ids: Sequence[int], wanted: int, start: int) -> int:
    try:
        return ids.index(wanted, start)
    except ValueError:
        return -1
