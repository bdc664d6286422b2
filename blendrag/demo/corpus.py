"""Which documents the demo reads, and what it asks about them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from blendrag.documents import DocumentChunk, Source, read_folder
from blendrag.errors import DocumentError

OWN_QUESTIONS = (
    "What does blendrag reuse, and why does that make a prompt faster?",
    "Which tokens of a reused chunk are computed again?",
    "How does blendrag know where the chunks of a prompt begin and end?",
)

_NUMBER = re.compile(r"^\d[\d.]*[a-z]?[.)]?\s+")
T = TypeVar("T")

_QUESTIONS = 3


def own_documentation() -> list[Source]:
    """README.md and docs/ of the checkout that this package runs from.

    Raises:
        DocumentError: the package was installed without them.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / "pyproject.toml").is_file() or not (root / "README.md").is_file():
        raise DocumentError("blendrag's own documentation is not installed with the package: name a folder of "
                            "documents, blendrag demo PATH")
    sources = read_folder(root / "README.md")
    if (root / "docs").is_dir():
        sources += [Source(f"docs/{source.path}", source.text) for source in read_folder(root / "docs")]
    return sources


def ask_about(chunks: Sequence[DocumentChunk]) -> list[str]:
    """Three questions about documents nobody has read: about headings spread over them, else about whole documents."""
    named = list(dict.fromkeys((chunk.source, chunk.heading) for chunk in chunks if chunk.heading))
    questions = [f"What does {source} say about “{_NUMBER.sub('', heading)}”?" for source, heading in _spread(named)]
    sources = list(dict.fromkeys(chunk.source for chunk in chunks))
    questions += [f"What is {source} about?" for source in _spread(sources)]
    questions += ["What is most important in these documents?", "Which facts and figures do these documents give?"]
    return questions[:_QUESTIONS]


def _spread(items: Sequence[T]) -> list[T]:
    """Up to three items, as far apart as they can be."""
    if len(items) <= _QUESTIONS:
        return list(items)
    return [items[round(number * (len(items) - 1) / (_QUESTIONS - 1))] for number in range(_QUESTIONS)]
