"""The bodies of OpenAI requests: which of their text is a document, and documents that are not in it yet.

What the model reads of a body that names no documents stays as it is, byte for byte; delimiters are taken out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from blendrag.config import BlendConfig
from blendrag.errors import PromptError
from blendrag.prompt import BlendPrompt
from blendrag.runtime.planning.marks import MARKS

SEPARATOR = "\n\n"
"""Stands between documents that a server places, and between the last of them and the text behind it."""

Rewrite = Callable[[dict[str, Any], BlendConfig], bool]
"""Changes a body in place; False where there is nothing to change."""

_Slot = tuple[Any, Any]  # a mapping or list, and the key under which it holds text


def rewrite_chat(body: dict[str, Any], config: BlendConfig) -> bool:
    """A body of /v1/chat/completions.

    `documents` as texts: each that stands in no message is put before the text of the last user message.  `documents`
    as mappings, vLLM's own form, are left to the chat template, which may put their "text" (or "content") into the
    prompt.  All of them, and what delimiters mark, become `kv_transfer_params["blend"]["documents"]`.

    Raises:
        PromptError: documents that are none, or have no user message to stand in.
    """
    messages = body.get("messages")
    if not isinstance(messages, list):
        return False  # vLLM says what is wrong with it
    slots = [slot for message in messages if isinstance(message, dict) for slot in _texts(message, "content")]
    marked = _take_marks(slots, config)
    texts, mappings = _documents(body)
    if texts is not None:
        del body["documents"]
        _place(_missing(texts, slots), messages)
    read = [mapping.get("text") or mapping.get("content") for mapping in mappings]
    _name(body, marked or [], [*(texts or []), *(text for text in read if isinstance(text, str))])
    return marked is not None or texts is not None or bool(mappings)


def rewrite_completion(body: dict[str, Any], config: BlendConfig) -> bool:
    """A body of /v1/completions; `documents` that are not in a prompt's text are put before it.

    Raises:
        PromptError: documents that are none, or mappings: there is no chat template that would read them.
    """
    prompt = body.get("prompt")
    slots = _texts(body, "prompt") if isinstance(prompt, (str, list)) else []
    marked = _take_marks(slots, config)
    texts, mappings = _documents(body)
    if mappings:
        raise PromptError("documents of a completion are texts, as no chat template reads them: send a list of strings")
    if texts is not None:
        del body["documents"]
        for slot in slots:
            _put(slot, _missing(texts, [slot]))
    _name(body, marked or [], texts or [])
    return marked is not None or texts is not None


def _texts(holder: dict[str, Any], key: str) -> list[_Slot]:
    """Where the text of a message's content, or of a prompt, is: it may come in parts."""
    content = holder.get(key)
    if isinstance(content, str):
        return [(holder, key)]
    slots: list[_Slot] = []
    for number, part in enumerate(content if isinstance(content, list) else []):
        if isinstance(part, str):
            slots.append((content, number))
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            slots.append((part, "text"))
    return slots


def _take_marks(slots: Iterable[_Slot], config: BlendConfig) -> list[str] | None:
    """The texts between delimiters, which are removed; None where there are no delimiters."""
    chunks: list[str] | None = None
    for holder, key in slots:
        if config.delimiter in holder[key]:
            prompt = BlendPrompt.from_text(holder[key], config.delimiter, keep_delimiter=config.keep_delimiter)
            holder[key] = prompt.text
            chunks = (chunks or []) + prompt.chunks
    return chunks


def _documents(body: dict[str, Any]) -> tuple[list[str] | None, list[dict[str, Any]]]:
    """The field `documents` as texts, each once, or as mappings; None and nothing where it is empty."""
    given = body.get("documents")
    if not isinstance(given, (list, type(None))):
        raise PromptError(f"documents are a list of texts, not {_kind(given)}: send [text, ...]")
    if not given:
        return None, []
    if all(isinstance(document, dict) for document in given):
        return None, given
    for document in given:
        if not isinstance(document, str):
            raise PromptError(f"a document is a text, not {_kind(document)}: send only strings, or only mappings for a "
                              "chat template that reads them")
        if not document.isascii() and any("\ud800" <= letter <= "\udfff" for letter in document):
            raise PromptError("a document holds half of a surrogate pair, which is no character: decode it with "
                              'errors="replace"')
    return list(dict.fromkeys(document for document in given if document.strip())), []


def _missing(documents: Sequence[str], slots: Sequence[_Slot]) -> list[str]:
    """The documents that stand in none of the texts; white space at their ends does not count."""
    return [document for document in documents
            if not any(document.strip() in holder[key] for holder, key in slots)]


def _place(documents: Sequence[str], messages: list[Any]) -> None:
    """Puts documents before the text of the last user message."""
    if not documents:
        return
    asked = next((message for message in reversed(messages)
                  if isinstance(message, dict) and message.get("role") == "user"), None)
    if asked is None:
        raise PromptError("documents are put before the last user message, and there is none: add one, or write them "
                          "into a message yourself")
    slots = _texts(asked, "content")
    if slots:
        _put(slots[0], documents)
    elif isinstance(asked.get("content"), list):
        asked["content"].insert(0, {"type": "text", "text": SEPARATOR.join(documents)})
    else:
        asked["content"] = SEPARATOR.join(documents)


def _put(slot: _Slot, documents: Sequence[str]) -> None:
    """Puts documents before a text."""
    holder, key = slot
    holder[key] = SEPARATOR.join([*documents, holder[key]])


def _name(body: dict[str, Any], marked: list[str], given: list[str]) -> None:
    """Tells the engine which texts are documents, unless the request shall not be blended."""
    named = marked + [document for document in given if document not in marked]
    transfer = body.get("kv_transfer_params") or {}
    if named and isinstance(transfer, dict) and transfer.get(MARKS) is not False:
        marks = transfer[MARKS] if isinstance(transfer.get(MARKS), dict) else {}
        known = marks.get("documents") or []
        if not isinstance(known, list):
            raise PromptError(f"documents are a list of texts, not {_kind(known)}: send [text, ...]")
        body["kv_transfer_params"] = transfer | {MARKS: marks | {"documents": known + named}}


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")
