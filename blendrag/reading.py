"""Prompts and messages as applications in this process hand them over: the one place where their marks are read."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from functools import cache

from blendrag import pairs
from blendrag.config import DELIMITER
from blendrag.errors import PromptError
from blendrag.prompt import BlendPrompt, escape_marks

logger = logging.getLogger(__name__)

_SHORTEST = 64  # characters of a document that is worth storing
_SEPARATOR = re.compile(r"\s*(\ue0013.*)?", re.DOTALL)


def as_prompt(prompt: str | BlendPrompt, delimiter: str | None = None, keep_delimiter: bool = False, *,
              documents: Iterable[str] = (), add_special_tokens: bool = True) -> BlendPrompt:
    """A `BlendPrompt` as it is, text with its marks read.

    Args:
        delimiter: as `BlendPrompt.from_text` takes it, like `keep_delimiter` and `add_special_tokens`; not read in
            text that has pairs of marks.
        documents: texts that are chunks wherever they stand in the text.  They are looked for before marks are read:
            what looks like a mark in them is theirs.

    Raises:
        PromptError: neither text nor a `BlendPrompt`.
    """
    if isinstance(prompt, BlendPrompt):
        return prompt
    if not isinstance(prompt, str):
        raise PromptError(f"a prompt is a str or a BlendPrompt, not {type(prompt).__name__}")
    texts = list(documents)
    own = _marked_documents(texts, prompt, delimiter)
    others = own.sub("x", prompt) if own else prompt
    if pairs.are_in(others):
        delimiter = None  # what `BlendPrompt.to_text` or `mark_chunks` made; a delimiter in it is text
    elif delimiter is None and is_toggled(others):
        _warn_once()
        delimiter = DELIMITER
    if own:
        prompt = own.sub(lambda found: escape_marks(found[0], delimiter), prompt)
    return BlendPrompt.from_text(prompt, delimiter, keep_delimiter=keep_delimiter,
                                 add_special_tokens=add_special_tokens).marking(texts)


def _marked_documents(texts: Sequence[str], prompt: str, delimiter: str | None) -> re.Pattern[str] | None:
    """What finds the documents of a prompt that hold marks of some form; None without any."""
    cores = {text.strip() for text in texts}
    holding = [core for core in cores if pairs.escape(core) != core or DELIMITER in core
               or (delimiter is not None and escape_marks(core, delimiter) != core)]
    present = sorted((core for core in holding if core in prompt), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, present))) if present else None


def is_toggled(text: str) -> bool:
    """Whether single U+E000 characters in a text are surely marks of an older blendrag, which toggled with them.

    Icon fonts, bullets and the fonts of PDFs put that character into text, too.  So all of them must be marks: an even
    number, around documents of 64 characters or more that neither begin nor end with white space, with white space (or
    an end of the text) outside, and nothing but the separator of `mark_chunks` between two documents.
    """
    if DELIMITER not in text:
        return False
    first, *pieces, last = text.split(DELIMITER)
    documents, separators = pieces[::2], pieces[1::2]
    return (len(pieces) % 2 == 1
            and not first[-1:].strip() and not last[:1].strip()
            and all(len(document) >= _SHORTEST and document == document.strip() for document in documents)
            and all(_SEPARATOR.fullmatch(separator) for separator in separators))


@cache
def _warn_once() -> None:
    logger.warning("a prompt marks documents with single U+E000 characters, as older versions of blendrag did; a later "
                   "one takes them for text: make it anew with mark_chunks or format_documents")
