"""The bodies of requests: which of their text is a document, and documents that are not in it yet.

What the model reads of a body that neither marks nor names documents stays as it is, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blendrag.blend_params import kind_of
from blendrag.config import BlendConfig
from blendrag.errors import RequestError
from blendrag.occurrences import Occurrences, code_points
from blendrag.prompt import BlendPrompt, escape_marks
from blendrag.serve.routes import Documents, Route
from blendrag.serve.texts import PromptTexts, Slot

_BETWEEN = np.array([0x110000], np.uint32)
"""Stands between texts that are searched together: no character, so nothing is found across it."""
_MAX_PROMPTS = 256
_MAX_PLACED = 1 << 24
"""Characters of documents that are put into the prompts of one body."""


@dataclass(frozen=True)
class NamedDocument:
    """A document of a request.

    Attributes:
        text: as it stands in the prompt, but for white space at its ends.
        label: what an error calls it: "documents[3]", or the number of its mark.
    """

    text: str
    label: str


def rewrite(body: dict[str, Any], route: Route, config: BlendConfig) -> tuple[list[NamedDocument], bool]:
    """Takes marks out of a body's texts, puts its `documents` where they are missing, and removes that field.

    A text that `documents` names is looked for before marks are read, so a mark in it is text.

    Returns:
        The documents, each text once, and whether the body was changed.

    Raises:
        RequestError: `documents` that are none, too many, or cannot be placed.
    """
    prompts = route.read(body)
    texts, mappings = _documents(body, route, config)
    if texts and (len(prompts) > _MAX_PROMPTS or sum(map(len, texts)) * len(prompts) > _MAX_PLACED):
        raise RequestError("documents", f"documents are put into each of the {len(prompts)} prompts of this request: "
                           "send fewer prompts at a time")
    search = Occurrences([code_points(text.strip()) for text in texts])
    absent = [_absent(prompt, texts, search, config) for prompt in prompts]
    marked = _take_marks([slot for prompt in prompts for slot in prompt.slots], config)
    for prompt, missing in zip(prompts, absent, strict=True):
        if missing and marked is not None:
            missing = _absent(prompt, missing, Occurrences([code_points(text.strip()) for text in missing]), None)
        if missing:
            prompt.place(missing)
    named = [NamedDocument(text, f"marked document {number}") for number, text in enumerate(marked or [])]
    named += [NamedDocument(text, f"documents[{number}]") for number, text in enumerate(body.get("documents") or [])
              if isinstance(text, str)]
    named += [NamedDocument(text, f"documents[{number}]") for number, mapping in enumerate(mappings)
              for text in _mapped_texts(mapping)]
    taken = _take_field(body, route, bool(mappings))
    seen: dict[str, NamedDocument] = {}
    for document in named:
        if document.text.strip():
            seen.setdefault(document.text, document)
    return list(seen.values()), marked is not None or taken


def _absent(prompt: PromptTexts, texts: Sequence[str], search: Occurrences, config: BlendConfig | None) -> list[str]:
    """The texts that stand nowhere in a prompt; white space at their ends does not count.

    Args:
        config: escapes marks in the texts that stand somewhere; None: leaves them.
    """
    if not texts:
        return []
    pieces, starts, length = [], [], 0
    for holder, key in prompt.slots:
        starts.append(length)
        points = code_points(holder[key])
        pieces += [points, _BETWEEN]
        length += len(points) + 1
    places = search.find(np.concatenate(pieces)) if pieces else [-1] * len(texts)
    if config is not None:
        _escape(prompt.slots, starts, [(place, text.strip()) for place, text in zip(places, texts, strict=True)
                                       if place >= 0 and escape_marks(text, config.delimiter) != text], config)
    return [text for place, text in zip(places, texts, strict=True) if place < 0]


def _escape(slots: Sequence[Slot], starts: Sequence[int], documents: Iterable[tuple[int, str]],
            config: BlendConfig) -> None:
    """Escapes marks in documents, so that reading the texts' marks leaves them as they are.

    Args:
        starts: where each text begins in what was searched.
        documents: place in what was searched, and text.
    """
    behind: dict[int, int] = {}
    replaced: dict[int, list[str]] = {}
    for place, document in sorted(documents):
        number = int(np.searchsorted(starts, place, side="right")) - 1
        start, done = place - starts[number], behind.get(number, 0)
        if start >= done:  # one that overlaps an earlier one is escaped as far as that goes
            holder, key = slots[number]
            replaced.setdefault(number, []).extend([holder[key][done:start], escape_marks(document, config.delimiter)])
            behind[number] = start + len(document)
    for number, pieces in replaced.items():
        holder, key = slots[number]
        holder[key] = "".join([*pieces, holder[key][behind[number]:]])


def _take_marks(slots: Iterable[Slot], config: BlendConfig) -> list[str] | None:
    """The texts of marked documents, whose marks are removed; None where no text has marks."""
    chunks: list[str] | None = None
    for holder, key in slots:
        text = holder[key]
        prompt = BlendPrompt.from_text(text, config.delimiter, keep_delimiter=config.keep_delimiter)
        if prompt.chunks or prompt.text != text:
            holder[key] = prompt.text
            chunks = chunks or []
            chunks += prompt.chunks
    if chunks and len(chunks) > config.max_documents:
        raise RequestError("documents", f"the text marks {len(chunks)} documents: mark {config.max_documents} at most")
    return chunks


def _documents(body: dict[str, Any], route: Route, config: BlendConfig) -> tuple[list[str], list[dict[str, Any]]]:
    """The field `documents` as texts to find or place, each once, and as mappings."""
    documents = body.get("documents")
    if not documents and isinstance(documents, (list, type(None))):
        return [], []
    if not isinstance(documents, list):
        raise RequestError("documents", f"documents are a list of texts, not {kind_of(documents)}: send [text, ...]")
    if len(documents) > config.max_documents:
        raise RequestError("documents", f"{len(documents)} documents are too many: send {config.max_documents} at most")
    for number, document in enumerate(documents):
        for text in [document] if isinstance(document, str) else list(_mapped_texts(document)):
            if _has_half_a_surrogate(text):
                raise RequestError("documents", f"documents[{number}] holds half of a surrogate pair, which is no "
                                   'character: decode it with errors="replace"')
    if route.documents is Documents.OWN:
        return [], [document if isinstance(document, dict) else {"text": document} for document in documents]
    if all(isinstance(document, dict) for document in documents):
        if route.documents not in (Documents.TEMPLATE, Documents.TEMPLATE_KWARGS):
            raise RequestError("documents", "documents are texts here, as no chat template reads them: send a list of "
                               "strings")
        return [], documents
    for number, document in enumerate(documents):
        if not isinstance(document, str):
            raise RequestError("documents", f"documents[{number}] is a text, not {kind_of(document)}: send only "
                               "strings, or only mappings for a chat template that reads them")
    return list(dict.fromkeys(document for document in documents if document.strip())), []


def _mapped_texts(mapping: Any) -> list[str]:
    """What a chat template may put into the prompt of a document that is a mapping."""
    if not isinstance(mapping, dict):
        return []
    fields = mapping | (mapping["data"] if isinstance(mapping.get("data"), dict) else {})
    text = next((fields[name] for name in ("text", "content", "snippet") if fields.get(name)), None)
    return [text] if isinstance(text, str) else []


def _take_field(body: dict[str, Any], route: Route, mappings: bool) -> bool:
    """Removes `documents` that the server has read; mappings go where a chat template finds them."""
    if "documents" not in body or route.documents is Documents.OWN or not body["documents"]:
        return False
    if not mappings:
        del body["documents"]
        return True
    if route.documents is Documents.TEMPLATE_KWARGS:
        kwargs = body.get("chat_template_kwargs")
        kwargs = kwargs if isinstance(kwargs, dict) else {}
        body["chat_template_kwargs"] = {"documents": body.pop("documents")} | kwargs
        return True
    return False


def _has_half_a_surrogate(text: str) -> bool:
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
