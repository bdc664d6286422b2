"""Where the texts are that the model reads of a request's body, prompt by prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from blendrag.errors import RequestError

SEPARATOR = "\n\n"
"""Stands between documents that a server places, and between the last of them and the text behind it."""

Slot = tuple[Any, Any]
"""A mapping or list of the body, and the key under which it holds a text."""


@dataclass
class PromptTexts:
    """The texts of one prompt.

    Attributes:
        slots: all of them, in order.
        place: puts documents into the prompt.
    """

    slots: list[Slot]
    place: Callable[[Sequence[str]], None]


Reader = Callable[[dict[str, Any]], list[PromptTexts]]
"""The prompts of a body; what is not of the form that the API describes is left out, and vLLM says what is wrong."""


def chat(body: dict[str, Any]) -> list[PromptTexts]:
    """A conversation in `messages`, or several."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return []
    many = [messages] if not all(isinstance(message, list) for message in messages) else messages
    return [_conversation(conversation, "text") for conversation in many]


def anthropic(body: dict[str, Any]) -> list[PromptTexts]:
    """`system` and `messages` of Anthropic's API."""
    messages = body.get("messages")
    return [_conversation(messages, "text", [*_texts(body, "system")])] if isinstance(messages, list) else []


def completion(body: dict[str, Any]) -> list[PromptTexts]:
    """Each text of `prompt`."""
    prompt = body.get("prompt")
    slots: list[Slot] = [(body, "prompt")] if isinstance(prompt, str) else [
        (prompt, number) for number, text in enumerate(prompt if isinstance(prompt, list) else [])
        if isinstance(text, str)]
    return [PromptTexts([slot], _before(slot)) for slot in slots]


def chat_or_completion(body: dict[str, Any]) -> list[PromptTexts]:
    """Whichever of the two a body is."""
    return chat(body) if "messages" in body else completion(body)


def responses(body: dict[str, Any]) -> list[PromptTexts]:
    """`instructions` and `input` of OpenAI's responses."""
    given = body.get("input")
    if isinstance(given, str):
        return [PromptTexts([*_texts(body, "instructions"), (body, "input")], _before((body, "input")))]
    return [_conversation(given, "input_text", [*_texts(body, "instructions")])] if isinstance(given, list) else []


def scoring(body: dict[str, Any]) -> list[PromptTexts]:
    """`query` and `items` of generative scoring."""
    return [PromptTexts([*_texts(body, "query"), *_texts(body, "items")], _nowhere("generative scoring"))]


def decisions(body: dict[str, Any]) -> list[PromptTexts]:
    """`instructions` and `state` of structured decisions."""
    return [PromptTexts([*_texts(body, "instructions"), *_strings(body, "state")], _nowhere("structured decisions"))]


def token_ids(body: dict[str, Any]) -> list[PromptTexts]:
    """A prompt that holds no text."""
    return [PromptTexts([], _nowhere("prompts of token ids"))]


def _conversation(messages: list[Any], kind: str, before: Sequence[Slot] = ()) -> PromptTexts:
    """Messages, after other texts.

    Args:
        kind: type of a part of a message that is text.
    """
    slots = list(before)
    for message in messages:
        if isinstance(message, dict):
            slots += [*_texts(message, "content"), *_texts(message, "output")]

    def place(documents: Sequence[str]) -> None:
        asked = next((message for message in reversed(messages)
                      if isinstance(message, dict) and message.get("role") == "user"), None)
        if asked is None:
            raise RequestError("documents", "documents are put before the last user message, and there is none: add "
                               "one, or write them into a message yourself")
        _into_message(asked, documents, kind)

    return PromptTexts(slots, place)


def _texts(holder: Any, key: Any) -> Iterator[Slot]:
    """The texts of a message's content, which may come in parts, of which a tool's result has parts of its own."""
    content = holder.get(key)
    if isinstance(content, str):
        yield holder, key
    for number, part in enumerate(content if isinstance(content, list) else []):
        if isinstance(part, str):
            yield content, number
        elif isinstance(part, dict):
            if isinstance(part.get("text"), str):
                yield part, "text"
            yield from _texts(part, "content")


def _strings(holder: Any, key: Any) -> Iterator[Slot]:
    """Every text in a JSON value."""
    value = holder[key] if isinstance(holder, list) else holder.get(key)
    if isinstance(value, str):
        yield holder, key
    elif isinstance(value, (dict, list)):
        for inner in value if isinstance(value, dict) else range(len(value)):
            yield from _strings(value, inner)


def _before(slot: Slot) -> Callable[[Sequence[str]], None]:
    holder, key = slot

    def place(documents: Sequence[str]) -> None:
        holder[key] = SEPARATOR.join([*documents, holder[key]])

    return place


def _nowhere(door: str) -> Callable[[Sequence[str]], None]:
    def place(documents: Sequence[str]) -> None:
        raise RequestError("documents", f"documents cannot be put into {door}: send them to /v1/chat/completions or "
                           "/v1/completions, or as part of the text")

    return place


def _into_message(message: dict[str, Any], documents: Sequence[str], kind: str) -> None:
    """Puts documents before the first text of a message; results of tools stay before it."""
    content = message.get("content")
    if not isinstance(content, list):
        message["content"] = SEPARATOR.join([*documents, content] if isinstance(content, str) else documents)
        return
    own = {id(content), *map(id, content)}  # not what is in a tool's result
    first = next((slot for slot in _texts(message, "content") if id(slot[0]) in own), None)
    if first is not None:
        _before(first)(documents)
        return
    results = sum(isinstance(part, dict) and part.get("type") == "tool_result" for part in content)
    content.insert(results, {"type": kind, "text": SEPARATOR.join(documents)})
