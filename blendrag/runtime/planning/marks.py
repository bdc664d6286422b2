"""What a request says about its chunks: spans of tokens, documents, a delimiter in its text, or nothing at all."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise, product
from typing import TYPE_CHECKING

from blendrag.blend_params import BLEND_PARAMS_KEY, BlendParams, read_blend_params
from blendrag.errors import RequestError
from blendrag.tokens import SegmentTokenizer

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_NEIGHBOURS = ("a", ".", "\n", " a", "7")


def parse_blend_params(request: Request, delimiter_ids: Sequence[int]) -> BlendParams | None:
    """What a request says about blending; None for one that shall not be blended.

    What makes no sense is logged, and the request is prefilled in full: a server's middleware has refused it before,
    but a server may run without it.

    Args:
        delimiter_ids: tokens of a configured delimiter, which stands between chunks in the prompts of clients that
            send text and give neither spans nor documents.
    """
    transfer = request.kv_transfer_params
    try:
        params = read_blend_params(transfer.get(BLEND_PARAMS_KEY) if isinstance(transfer, dict) else transfer or None)
    except RequestError as error:
        logger.warning("request %s is prefilled in full: %s", request.request_id, error)
        return None
    if not params:
        return None
    if not params.spans and not params.documents and not params.document_ids:
        spans = [list(span) for span in delimited(request.prompt_token_ids or [], delimiter_ids)]
        return params.model_copy(update={"spans": spans})
    return params


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
