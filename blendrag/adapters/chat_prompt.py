"""A conversation as a prompt that knows where the documents of its messages are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from blendrag.adapters.chat import render_chat, template_rows
from blendrag.adapters.sentinels import Sentinels
from blendrag.config import BlendConfig
from blendrag.errors import PromptError
from blendrag.prompt import BlendPrompt
from blendrag.reading import as_prompt
from blendrag.tokens import control_token_in


def chat_prompt(tokenizer: Any, messages: Sequence[Mapping[str, Any]], config: BlendConfig | None = None,
                template: str | None = None, *, documents: Iterable[str] = (),
                variables: Mapping[str, Any] | None = None) -> BlendPrompt:
    """The prompt of a conversation, up to where the model's answer begins.

    Marks are read in each text of the messages by itself, before the template is applied.  So the prompt's text is what
    the template makes of the messages without marks, and no chunk holds anything of the template's own text or of two
    messages.

    Args:
        messages: as `render_chat` takes them.
        config: of the engine, for a delimiter that it may have; None: documents stand between pairs of marks.
        documents: texts that are chunks wherever they stand in a message, or in a variable of the template.
        variables: for the template, as `render_chat` takes them.

    Raises:
        PromptError: as `render_chat`, or a document that the template changes spells a control token.
    """
    delimiter, keep, shortest = (config.delimiter, config.keep_delimiter, config.min_chunk_tokens) if config else (
        None, False, 1)
    # Fewer characters than that cannot be enough tokens to be stored.
    named = [text for text in documents if len(text) >= shortest or control_token_in(tokenizer, text) is not None]
    chunks: list[str] = []

    @cache
    def read(text: str) -> BlendPrompt:
        return as_prompt(text, delimiter, keep, documents=named)

    def plain(text: str) -> str:
        chunks.extend(read(text).chunks)
        return read(text).text

    def rendered(change: Callable[[str], str]) -> str:
        shown = {name: value if name == "tools" else _each_text(value, change)
                 for name, value in (variables or {}).items()}
        return render_chat(tokenizer, _each_text(rows, change), template, **shown)

    rows = template_rows(messages)
    sentinels = Sentinels(rendered(plain))
    if not chunks:
        return BlendPrompt(sentinels.text, add_special_tokens=False)
    with_sentinels = rendered(lambda text: sentinels.put(read(text)))
    spans, lost = sentinels.spans(with_sentinels) or sentinels.search()
    for number in sorted(lost):
        if (token := control_token_in(tokenizer, sentinels.documents[number])) is not None:
            raise PromptError(f"the chat template changes a document that spells the control token {token!r}, so that "
                              "it cannot be kept apart from the template's own: take it out of the document, or pass "
                              "a template that shows documents as they are")
    return sentinels.prompt(spans)


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """A value with each text in it changed; names of fields stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _each_text(item, change) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_each_text(item, change) for item in value]
    return value
