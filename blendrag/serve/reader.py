"""Tokens of the documents that requests name, read before the engine sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from blendrag.errors import PromptError, RequestError
from blendrag.serve.body import NamedDocument
from blendrag.tokens import SegmentTokenizer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class DocumentReader:
    """Tokenises documents as they are in a prompt that was tokenised in one go.  Safe to call from several threads.

    Args:
        tokens: the model's.
        max_model_len: longest prompt plus answer, in tokens.
    """

    def __init__(self, tokens: SegmentTokenizer, max_model_len: int) -> None:
        self._tokens = tokens
        self._max_model_len = max_model_len
        self._max_characters = max_model_len * tokens.longest_token

    def check(self, documents: Sequence[NamedDocument]) -> None:
        """Refuses documents that no prompt can hold, and those that would end or begin a turn of the conversation.

        Raises:
            RequestError: it names the document.
        """
        for document in documents:
            long = len(document.text) > self._max_characters
            if long or len(ids := self._array(document.text)) >= self._max_model_len:
                raise RequestError("documents", f"{document.label} is longer than the {self._max_model_len} tokens "
                                   "that the model takes: split it")
            if spelling := self._tokens.control_token(ids.tolist()):
                raise RequestError("documents", f"{document.label} spells the model's control token {spelling!r}, "
                                   "which vLLM would read as such: take it out, or write it with a space in it")

    def ids(self, text: str) -> list[int]:
        """The token ids of a text."""
        ids: list[int] = self._array(text).tolist()
        return ids

    def _array(self, text: str) -> npt.NDArray[np.int64]:
        try:
            return self._tokens.text_array(text)
        except PromptError as error:
            raise RequestError("documents", str(error)) from error
