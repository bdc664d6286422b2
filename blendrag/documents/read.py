"""Text of .md, .txt, .html and .pdf files."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blendrag.documents.html import html_text
from blendrag.errors import DocumentError

_PLAIN = {".md", ".markdown", ".txt"}
_HTML = {".html", ".htm", ".xhtml"}
_PDF = {".pdf"}
_KINDS = "a folder of .md, .txt, .html or .pdf files"


class DocumentWarning(UserWarning):
    """A file was skipped, or could be read only in part."""


@dataclass(frozen=True)
class Source:
    """A document.

    Attributes:
        path: its path below the folder that was read, with "/" between the parts.
        text: its text; headings of HTML are written as Markdown's.
    """

    path: str
    text: str


def read_folder(path: str | Path) -> list[Source]:
    """Reads the documents of a folder and its subfolders, or one document.

    Hidden files and folders and files of other kinds are left out.  A file that cannot be read is skipped with a
    `DocumentWarning`.

    Returns:
        The documents that hold text, in the order of their paths.

    Raises:
        DocumentError: there is no such folder, or nothing readable in it.
    """
    root = Path(path).expanduser()
    if not root.exists():
        raise DocumentError(f"{path} does not exist: name {_KINDS}")
    files = [(root.name, root)] if root.is_file() else sorted(_find(root))
    sources = [source for name, file in files if (source := _read(name, file)) is not None]
    if not sources:
        raise DocumentError(f"{path} holds no document that can be read: name {_KINDS}")
    return sources


def decode(data: bytes, *, is_html: bool = False) -> str:
    """Text of a file: UTF-8, else what the file declares, else what its bytes look like.

    Raises:
        ValueError: the bytes are no text.
    """
    from bs4.dammit import UnicodeDammit

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = UnicodeDammit(data, ["utf-8"], is_html=is_html).unicode_markup
    if text is None or "\0" in text:
        raise ValueError("it is a binary file")
    return str(text)


def _find(root: Path) -> Iterator[tuple[str, Path]]:
    def skipped(error: OSError) -> None:
        _warn(os.path.relpath(error.filename, root), error.strerror or str(error))

    for folder, subfolders, names in os.walk(root, onerror=skipped):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            file = Path(folder, name)
            if not name.startswith(".") and file.suffix.lower() in _PLAIN | _HTML | _PDF:
                yield file.relative_to(root).as_posix(), file


def _read(name: str, file: Path) -> Source | None:
    kind = file.suffix.lower()
    try:
        if not file.is_file():
            raise ValueError("it is not a regular file")
        if kind in _PDF:
            text = _pdf_text(name, file)
        elif kind in _HTML:
            text = html_text(decode(file.read_bytes(), is_html=True))
        else:
            text = decode(file.read_bytes())
    except Exception as error:  # a damaged file can raise anything, above all from pypdf
        _warn(name, error.strerror if isinstance(error, OSError) and error.strerror else str(error) or repr(error))
        return None
    text = _clean(text)
    if not text:
        _warn(name, "it holds no text" + (" (scanned pages need OCR first)" if kind in _PDF else ""))
        return None
    return Source(name, text)


def _pdf_text(name: str, file: Path) -> str:
    from pypdf import PdfReader

    reader = PdfReader(file)
    pages = []
    for number, page in enumerate(reader.pages, 1):
        try:
            pages.append(page.extract_text())
        except Exception as error:  # one damaged page must not cost the others
            _warn(f"page {number} of {name}", str(error) or repr(error))
    return "\n\n".join(pages)


def _clean(text: str) -> str:
    """One kind of line break, no control characters, no lone surrogates (PDF fonts map to anything)."""
    text = re.sub(r"\r\n?|\x85|\u2028|\u2029|\f", "\n", text)
    text = re.sub(r"[\x00-\x08\x0b\x0e-\x1f\x7f\ufeff]", "", text)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").strip()


def _warn(name: str, reason: str) -> None:
    warnings.warn(f"{name} was skipped: {reason}", DocumentWarning, stacklevel=2)
