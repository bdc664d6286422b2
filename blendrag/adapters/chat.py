"""Chat messages to prompt text, with the model's own template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from blendrag.errors import PromptError


def has_chat_template(tokenizer: Any) -> bool:
    """Whether the model comes with a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def chat_template_of(tokenizer: Any, template: str | None = None, tools: bool = False) -> str:
    """The template that `render_chat` would use.

    Args:
        tools: some models have one of their own for conversations with tools.

    Raises:
        PromptError: there is none.
    """
    if template is None and not has_chat_template(tokenizer):
        raise PromptError("the model has no chat template: pass one as chat_template, or use plain text completion")
    found: str = tokenizer.get_chat_template(template, tools=[{}] if tools else None)
    return found


def reads_tools(template: str) -> bool:
    """Whether a chat template shows tools to the model."""
    return "tools" in template


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]], template: str | None = None,
                **variables: Any) -> str:
    """The prompt text of a conversation, up to where the model's answer begins.

    Marks of documents in the messages stay where they are: `chat_prompt` reads them.  The text carries its own special
    tokens: it is tokenised with `add_special_tokens=False`.

    Args:
        messages: `{"role": ..., "content": text}`, and what else the template reads.  Content may be a list of OpenAI's
            parts of text, which become lines of one.  Arguments of earlier tool calls may be JSON text, as in OpenAI's
            API: templates get them as objects.
        template: a Jinja template to use in place of the model's.
        variables: for the template, such as `tools` or `enable_thinking`.

    Raises:
        PromptError: no template, content that is not text, or messages the template refuses.
    """
    used = chat_template_of(tokenizer, template, bool(variables.get("tools")))
    try:
        text: str = tokenizer.apply_chat_template(template_rows(messages), chat_template=used, tokenize=False,
                                                  add_generation_prompt=True, **variables)
    except (TemplateError, TypeError) as error:  # a template that reads what is not there fails as Python does
        raise PromptError(f"the chat template does not take these messages ({error}): change their roles or order, "
                          "or pass another template as chat_template") from error
    return text


def template_rows(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them; PromptError for content that is not text."""
    return [_row(message) for message in messages]


def _row(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        content = "\n".join(part["text"] for part in content)  # as vLLM joins them
    if not isinstance(content, str):
        raise PromptError("the model reads text only: leave images, audio and files out of the messages")
    row = {**message, "content": content}
    if calls := message.get("tool_calls"):
        row["tool_calls"] = [{**call, "function": {**call["function"], "arguments": _object(call["function"])}}
                             for call in calls]
    return row


def _object(function: Mapping[str, Any]) -> Any:
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except json.JSONDecodeError:
        return arguments  # a call that was cut short, shown to the model as it was
