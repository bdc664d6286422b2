"""Chat messages to prompt text, with the model's own template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from blendrag.errors import PromptError


def has_chat_template(tokenizer: Any) -> bool:
    """Whether the model comes with a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]], template: str | None = None,
                **variables: Any) -> str:
    """The prompt text of a conversation, up to where the model's answer begins.

    Chunk delimiters in the messages stay where they are.  The text carries its own special tokens: it is tokenised with
    `add_special_tokens=False`.

    Args:
        messages: `{"role": ..., "content": text}`, and what else the template reads.
        template: a Jinja template to use in place of the model's.
        variables: for the template, such as `tools` or `enable_thinking`.

    Raises:
        PromptError: no template, content that is not text, or messages the template refuses.
    """
    for message in messages:
        if not isinstance(message.get("content") or "", str):
            raise PromptError("the model reads text only: leave images, audio and files out of the messages")
    if template is None and not has_chat_template(tokenizer):
        raise PromptError("the model has no chat template: pass one as chat_template, or use plain text completion")
    try:
        text: str = tokenizer.apply_chat_template(list(messages), chat_template=template, tokenize=False,
                                                  add_generation_prompt=True, **variables)
    except TemplateError as error:
        raise PromptError(f"the chat template does not take these messages ({error}): change their roles or order, "
                          "or pass another template as chat_template") from error
    return text
